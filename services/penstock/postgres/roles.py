"""Roles with least privilege: one for each service, with only the rights that its statements need.

`schemas/postgres/roles.sql` declares them. A plan has the statements that add missing rights, and
those that revoke undeclared ones. Revocations run on request only, since services of the previous
release may still need the rights. The roles cannot log in until an operator gives them a password
or another credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from penstock.contracts.files import schemas_folder
from penstock.postgres import migrations
from penstock.postgres.connection import SESSION_SETTINGS, close, connect, translated
from penstock.postgres.queries import query

PREFIX = "penstock_"

_GRANT = re.compile(
    r"^GRANT (?P<privileges>\w+(?:, \w+)*)(?: \((?P<columns>[^)]*)\))?(?: ON (?P<object>[^;]+?))? TO (?P<role>\w+);$",
    re.MULTILINE,
)


@dataclass(frozen=True, order=True)
class Right:
    """One right of a role.

    Attributes:
        role: the role.
        object: a table, `SCHEMA penstock`, `FUNCTION name(arguments)`, or a role of which this role
            is a member.
        privilege: the privilege in capitals; "" is membership.
        part: a column; "" is the whole object.
    """

    role: str
    object: str
    privilege: str
    part: str = ""


@dataclass(frozen=True)
class Plan:
    """Statements, without semicolons, that make a database's roles equal to the declaration.

    Attributes:
        add: creates roles and grants missing rights.
        revoke: revokes undeclared rights.
        before_tables: those of `add` that need no table; an owner without CREATEROLE cannot
            execute them.
    """

    add: tuple[str, ...]
    revoke: tuple[str, ...]
    before_tables: tuple[str, ...] = ()


@cache
def declared(prefix: str = PREFIX) -> frozenset[Right]:
    """Returns all rights in `roles.sql`, for roles whose names begin with `prefix`."""
    text = (schemas_folder() / "postgres" / "roles.sql").read_text(encoding="utf-8")
    rights = set()
    for grant in _GRANT.finditer(text):
        role = prefix + grant["role"].removeprefix(PREFIX)
        if grant["object"] is None:
            rights.add(Right(role, grant["privileges"], ""))
            continue
        for privilege in grant["privileges"].split(", "):
            rights |= {
                Right(role, grant["object"], privilege, column)
                for column in (grant["columns"] or "").split(", ")
            }
    return frozenset(rights)


def role_names(prefix: str = PREFIX) -> list[str]:
    """Returns all role names, sorted."""
    return sorted({right.role for right in declared(prefix)})


def script(prefix: str = PREFIX, database: str = "CURRENT_DATABASE") -> list[str]:
    """Returns all statements for a database without any of the roles.

    Args:
        prefix: prefix of the role names.
        database: name of the database, quoted for SQL.
    """
    return list(_plan(prefix, database, existing=set(), granted=set(), settings=set()).add)


def _plan(
    prefix: str,
    database: str,
    *,
    existing: set[str],
    granted: set[Right],
    settings: set[tuple[str, str]],
    public_functions: Iterable[str] = (),
) -> Plan:
    required = declared(prefix)
    add = [f"CREATE ROLE {role} NOLOGIN" for role in role_names(prefix) if role not in existing]
    add += [
        f"ALTER ROLE {role} IN DATABASE {database} SET {name} = {value}"
        for role in role_names(prefix)
        for name, value in SESSION_SETTINGS.items()
        if (role, f"{name}={value}") not in settings
    ]
    missing = required - granted
    memberships = {right for right in missing if not right.privilege}
    before_tables = tuple(add + [f"GRANT {phrase} TO {role}" for role, phrase in _phrases(memberships)])
    # With the additions, since no release needs this right.
    add += [f"REVOKE EXECUTE ON {function} FROM PUBLIC" for function in public_functions]
    add += [f"GRANT {phrase} TO {role}" for role, phrase in _phrases(missing)]
    return Plan(
        tuple(add),
        tuple(f"REVOKE {phrase} FROM {role}" for role, phrase in _phrases(granted - required)),
        before_tables,
    )


def _phrases(rights: Iterable[Right]) -> Iterable[tuple[str, str]]:
    """Returns (role, the rights on one object as GRANT and REVOKE name them)."""

    # The schema comes first, since its objects cannot be used without it.
    def sort_key(right: Right) -> tuple[str, bool, str, str]:
        column_of = right.privilege if right.part else ""
        return right.role, not right.object.startswith("SCHEMA"), right.object, column_of

    for (role, _, thing, column_of), group in groupby(
        sorted(rights, key=lambda r: (sort_key(r), r)), key=sort_key
    ):
        same_object = list(group)
        if column_of:
            yield (
                role,
                f"{column_of} ({', '.join(right.part for right in same_object)}) ON {_qualified(thing)}",
            )
        elif same_object[0].privilege:
            yield role, f"{', '.join(right.privilege for right in same_object)} ON {_qualified(thing)}"
        else:
            yield role, thing


def _qualified(thing: str) -> str:
    if thing.startswith("SCHEMA "):
        return thing
    if thing.startswith("FUNCTION "):
        return f"FUNCTION penstock.{thing.removeprefix('FUNCTION ')}"
    return f"penstock.{thing}"


async def plan(dsn: str, prefix: str = PREFIX) -> Plan:
    """Returns the plan for a database.

    Raises:
        PostgresUnavailable: no server answers.
    """
    connection = await connect(dsn, "roles")
    try:
        with translated():
            return await plan_for(connection, prefix)
    finally:
        await close(connection)


async def apply(dsn: str, prefix: str = PREFIX, *, revoke: bool = False) -> Plan:
    """Executes the plan for a database in one transaction, and returns it.

    Args:
        dsn: connection URL of the tables' owner with CREATEROLE, or of a superuser.
        prefix: prefix of the role names.
        revoke: whether to revoke undeclared rights too.

    Raises:
        PostgresUnavailable: no server answers.
        SettingsError: the user lacks the rights for it.
    """
    connection = await connect(dsn, "roles")
    try:
        with translated():
            # The lock of migrations: two runs must not overlap, and tables must not change
            # meanwhile.
            await migrations.lock(connection)
            async with connection.transaction():
                current = await plan_for(connection, prefix)
                for statement in (*current.add, *(current.revoke if revoke else ())):
                    await connection.execute(statement)
            return current
    finally:
        await close(connection)


async def plan_for(connection: Any, prefix: str) -> Plan:
    """Returns the plan for the database of a connection."""
    fetch = connection.fetch
    names = role_names(prefix)
    granted = await fetch(query("roles.granted"), names)
    settings = await fetch(query("roles.settings"), names)
    return _plan(
        prefix,
        (await fetch(query("roles.database")))[0]["name"],
        existing={row["role"] for row in await fetch(query("roles.existing"), names)},
        granted={Right(row["role"], row["object"], row["privilege"], row["part"]) for row in granted},
        public_functions=[row["object"] for row in await fetch(query("roles.public_functions"))],
        settings={(row["role"], row["setting"]) for row in settings},
    )
