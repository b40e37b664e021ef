"""Lets roles log in, and creates the owner of the tables: once as a superuser, before migrations.

The server gets verifiers instead of passwords (`core.scram`). So it cannot check them against a
policy, and its log cannot show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.scram import SALT_BYTES, postgres_verifier
from penstock.postgres import migrations, roles
from penstock.postgres.connection import close, connect, translated
from penstock.postgres.queries import query


async def apply(
    dsn: str,
    passwords: Mapping[str, str],
    random_bytes: Callable[[int], bytes],
    *,
    prefix: str = roles.PREFIX,
    owner: str | None = None,
) -> list[str]:
    """Creates missing roles, and lets those with a password log in; returns what it executed.

    Rights on tables follow with `roles.apply`, as the owner: there may be no tables yet.

    Args:
        dsn: connection URL of a superuser.
        passwords: by role; see `core.scram.password_fault`. Other roles stay as they are.
        random_bytes: makes a salt of that many bytes.
        prefix: prefix of the role names.
        owner: a role that may create the tables; None creates none. The connection's own user keeps
            its password.

    Raises:
        PostgresUnavailable: no server answers.
        SettingsError: the user is no superuser.
    """
    connection = await connect(dsn, "roles")
    try:
        with translated():
            # The lock of migrations, as `roles.apply`.
            await migrations.lock(connection)
            async with connection.transaction():
                statements = await _statements(connection, prefix, owner)
                for statement in statements:
                    await connection.execute(statement)
                user = await connection.fetchval(query("roles.user"))
                for role in sorted(passwords.keys() - {user}):
                    verifier = postgres_verifier(passwords[role], random_bytes(SALT_BYTES))
                    quoted = await connection.fetchval(query("roles.quoted"), role)
                    await connection.execute(f"ALTER ROLE {quoted} LOGIN PASSWORD '{verifier}'")
                    statements.append(f"ALTER ROLE {quoted} LOGIN PASSWORD '…'")
            return statements
    finally:
        await close(connection)


async def _statements(connection: Any, prefix: str, owner: str | None) -> list[str]:
    statements = [*(await roles.plan_for(connection, prefix)).before_tables]
    if owner is not None:
        quoted = await connection.fetchval(query("roles.quoted"), owner)
        database = await connection.fetchval(query("roles.database"))
        if not await connection.fetch(query("roles.existing"), [owner]):
            statements.append(f"CREATE ROLE {quoted} NOLOGIN")
        statements.append(f"GRANT CREATE ON DATABASE {database} TO {quoted}")
    return statements
