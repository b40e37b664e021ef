"""A role for each service, with the rights its statements need and no others.

`schemas/postgres/roles.sql` declares them. A plan is what a database lacks of it, in SQL; what it has beyond is taken away
only when that is asked for, since services of the version before may still need it. The roles cannot log in: giving
them a password (or another way in) is the operator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from penstock.contracts.files import schemas_folder
from penstock.postgres.connection import SESSION_SETTINGS, connect, translated
from penstock.postgres.queries import query

PREFIX = "penstock_"

_GRANT = re.compile(
    r"^GRANT (?P<privileges>\w+(?:, \w+)*)(?: \((?P<columns>[^)]*)\))?(?: ON (?P<object>[^;]+?))? TO (?P<role>\w+);$",
    re.MULTILINE,
)


@dataclass(frozen=True, order=True)
class Right:
    """One thing a role may do.

    Attributes:
        role: whose.
        object: a table, `SCHEMA penstock`, `FUNCTION name(arguments)`, or the role it is a member of.
        privilege: in capitals; "" is membership.
        part: a column; "" is all of the object.
    """

    role: str
    object: str
    privilege: str
    part: str = ""


@dataclass(frozen=True)
class Plan:
    """What brings the roles of a database to what is declared, as statements without a semicolon.

    Attributes:
        add: makes roles and gives them what they lack.
        revoke: takes away what they have beyond.
    """

    add: tuple[str, ...]
    revoke: tuple[str, ...]


@cache
def declared(prefix: str = PREFIX) -> frozenset[Right]:
    """Every right that `roles.sql` gives, to roles whose names begin with `prefix`."""
    text = (schemas_folder() / "postgres" / "roles.sql").read_text()
    found = set()
    for grant in _GRANT.finditer(text):
        role = prefix + grant["role"].removeprefix(PREFIX)
        if grant["object"] is None:
            found.add(Right(role, grant["privileges"], ""))
            continue
        for privilege in grant["privileges"].split(", "):
            found |= {
                Right(role, grant["object"], privilege, column)
                for column in (grant["columns"] or "").split(", ")
            }
    return frozenset(found)


def role_names(prefix: str = PREFIX) -> list[str]:
    """All roles, sorted."""
    return sorted({right.role for right in declared(prefix)})


def script(prefix: str = PREFIX, database: str = "CURRENT_DATABASE") -> list[str]:
    """All statements for a database in which there is none of it.

    Args:
        prefix: of the roles' names.
        database: its name, quoted as SQL wants it.
    """
    return list(_plan(prefix, database, there=set(), granted=set(), settings=set()).add)


def _plan(
    prefix: str,
    database: str,
    *,
    there: set[str],
    granted: set[Right],
    settings: set[tuple[str, str]],
    everybodys: Iterable[str] = (),
) -> Plan:
    wanted = declared(prefix)
    add = [f"CREATE ROLE {role} NOLOGIN" for role in role_names(prefix) if role not in there]
    add += [
        f"ALTER ROLE {role} IN DATABASE {database} SET {name} = {value}"
        for role in role_names(prefix)
        for name, value in SESSION_SETTINGS.items()
        if (role, f"{name}={value}") not in settings
    ]
    # At once, and not only when asked for: nobody is meant to have it.
    add += [f"REVOKE EXECUTE ON {function} FROM PUBLIC" for function in everybodys]
    add += [f"GRANT {words} TO {role}" for role, words in _in_words(wanted - granted)]
    return Plan(
        tuple(add), tuple(f"REVOKE {words} FROM {role}" for role, words in _in_words(granted - wanted))
    )


def _in_words(rights: Iterable[Right]) -> Iterable[tuple[str, str]]:
    """Rights as GRANT and REVOKE name them, those on the same part of an object together; with their role."""

    # The schema first: nothing in it is of use without.
    def place(right: Right) -> tuple[str, bool, str, str]:
        column_of = right.privilege if right.part else ""
        return right.role, not right.object.startswith("SCHEMA"), right.object, column_of

    for (role, _, thing, column_of), group in groupby(sorted(rights, key=lambda r: (place(r), r)), key=place):
        found = list(group)
        if column_of:
            yield role, f"{column_of} ({', '.join(right.part for right in found)}) ON {_qualified(thing)}"
        elif found[0].privilege:
            yield role, f"{', '.join(right.privilege for right in found)} ON {_qualified(thing)}"
        else:
            yield role, thing


def _qualified(thing: str) -> str:
    if thing.startswith("SCHEMA "):
        return thing
    if thing.startswith("FUNCTION "):
        return f"FUNCTION penstock.{thing.removeprefix('FUNCTION ')}"
    return f"penstock.{thing}"


async def plan(dsn: str, prefix: str = PREFIX) -> Plan:
    """What a database lacks, and what it has beyond.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(dsn, "roles")
    try:
        with translated():
            return await _look(connection, prefix)
    finally:
        await connection.close()


async def apply(dsn: str, prefix: str = PREFIX, *, revoke: bool = False) -> Plan:
    """Carries a plan out in one transaction, and returns it.

    Args:
        dsn: of a user who may make roles and grant rights on the tables: their owner with CREATEROLE, or a superuser.
        prefix: of the roles' names.
        revoke: also take away what is not declared.

    Raises:
        PostgresUnavailable: no server.
        SettingsError: the user may not.
    """
    connection = await connect(dsn, "roles")
    try:
        with translated():
            # Neither two of these at once, nor one while tables change.
            await connection.execute(query("migrations.lock"))
            async with connection.transaction():
                found = await _look(connection, prefix)
                for statement in (*found.add, *(found.revoke if revoke else ())):
                    await connection.execute(statement)
            return found
    finally:
        await connection.close()


async def _look(connection: Any, prefix: str) -> Plan:
    fetch = connection.fetch
    names = role_names(prefix)
    granted = await fetch(query("roles.granted"), names)
    settings = await fetch(query("roles.settings"), names)
    return _plan(
        prefix,
        (await fetch(query("roles.database")))[0]["name"],
        there={row["role"] for row in await fetch(query("roles.there"), names)},
        granted={Right(row["role"], row["object"], row["privilege"], row["part"]) for row in granted},
        everybodys=[row["object"] for row in await fetch(query("roles.open"))],
        settings={(row["role"], row["setting"]) for row in settings},
    )
