"""Flow definitions: their rows, and what a start needs of them and of those below them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from penstock.core.flow.outline import Outline, Reference, is_same
from penstock.errors import Conflict, NotFound, TooLarge
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, fetchrow

# The most definitions below one. Reading them takes time and memory.
MAX_BELOW = 1_000

# The bytes of outlines in memory, by their declared inputs. Beyond them, the least recently used
# one is read again at its next use.
_CACHE_BYTES = 32 * 1024 * 1024
_OUTLINE_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class StoredDefinition:
    """A row of `flow_definition`.

    Attributes:
        name: of the definition.
        version: of the definition.
        definition: as in `schemas/flows/definition.schema.json`.
        created_at: when it was stored.
        created_by: the actor who stored it; None without authentication.
    """

    name: str
    version: int
    definition: Mapping[str, Any]
    created_at: datetime
    created_by: str | None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of answers."""
        return {name: getattr(self, name) for name in self.__slots__}


async def insert(
    executor: Any, definition: Mapping[str, Any], actor: str | None
) -> tuple[StoredDefinition, bool]:
    """Stores a valid definition; returns the stored one, and whether it is new.

    Args:
        executor: a pool, or a connection whose transaction the statement joins.
        definition: has a name and a version.
        actor: who stores it; None without authentication.

    Raises:
        Conflict: the version exists with another content.
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    name, version = definition["flow"], int(definition["version"])
    text = orjson.dumps({**definition, "version": version}).decode()
    row = await fetchrow(
        executor, "flow_definitions.insert", name=name, version=version, definition=text, created_by=actor
    )
    if row is not None:
        return _stored(row), True
    existing = await find(executor, name, version)
    assert existing is not None, "no definition is ever deleted"
    require_same(existing, definition)
    return existing, False


def require_same(existing: StoredDefinition, definition: Mapping[str, Any]) -> None:
    """Requires that a definition has the content of the stored one.

    Raises:
        Conflict: it has another.
    """
    if not is_same(existing.definition, {**definition, "version": existing.version}):
        raise Conflict(
            f"flow {existing.name!r} has version {existing.version} with another content, and versions do not "
            "change: raise `version`, and upload the definition as a new version"
        )


async def lock(connection: Any) -> None:
    """Holds back other definitions with child flows until the end of the transaction.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    await execute(connection, "flow_definitions.lock")


async def find(executor: Any, name: str, version: int | None) -> StoredDefinition | None:
    """One definition, or the newest one of a name; None if there is none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    with translated():
        if version is None:
            row = await fetchrow(executor, "flow_definitions.get_newest", name)
        else:
            row = await fetchrow(executor, "flow_definitions.get", name, version)
    return None if row is None else _stored(row)


async def get(executor: Any, name: str, version: int | None = None) -> StoredDefinition:
    """As `find`.

    Raises:
        NotFound: there is no such definition.
        PostgresUnavailable: the database is unavailable.
    """
    found = await find(executor, name, version)
    if found is None:
        raise not_found(name, version)
    return found


def not_found(name: str, version: int | None = None) -> NotFound:
    """The error about a definition that does not exist."""
    which = f"version {version} of " if version is not None else ""
    return NotFound(f"there is no {which}flow definition {name!r}")


async def versions(
    executor: Any, name: str, *, below: int | None = None, limit: int = 50
) -> list[asyncpg.Record]:
    """Versions of a definition, newest first: version, description, created_at and created_by.

    Args:
        executor: a pool or a connection.
        name: of the definition.
        below: the last version of the page before.
        limit: most rows.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(executor, "flow_definitions.versions", name, below, limit)


async def names(
    executor: Any, *, namespaces: Sequence[str] | None = None, after: str | None = None, limit: int = 50
) -> list[asyncpg.Record]:
    """Definitions by name: the newest version, the number of versions, and when it was stored.

    Args:
        executor: a pool or a connection.
        namespaces: only definitions of these; None is all.
        after: the last name of the page before.
        limit: most rows.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(
        executor, "flow_definitions.names", after, None if namespaces is None else list(namespaces), limit
    )


async def _newest(executor: Any, wanted: Iterable[str]) -> dict[str, int]:
    rows = await fetch(executor, "flow_definitions.newest", list(wanted))
    return {row["name"]: row["version"] for row in rows}


def _stored(row: Mapping[str, Any]) -> StoredDefinition:
    return StoredDefinition(
        row["name"], row["version"], orjson.loads(row["definition"]), row["created_at"], row["created_by"]
    )


@dataclass(slots=True)
class Reached:
    """Definitions and those below them, as of one moment.

    Attributes:
        newest: the newest version by name; names without a definition are missing.
        outlines: by name and version.
    """

    newest: dict[str, int] = field(default_factory=dict)
    outlines: dict[tuple[str, int], Outline] = field(default_factory=dict)

    def get(self, name: str, version: int | None) -> Outline | None:
        """The outline with a name and a version, None for the newest; None if there is none."""
        version = self.newest.get(name) if version is None else version
        return None if version is None else self.outlines.get((name, version))

    def versions_of(self, outline: Outline) -> dict[str, int]:
        """The version of each definition below one: what a flow keeps from its start.

        A child flow that names a version has that version, and all others have the one here.
        """
        pinned: dict[str, int] = {}
        explicit: dict[str, int] = {}
        seen: set[Reference] = set()
        waiting = [*outline.children]
        while waiting:
            reference = waiting.pop()
            found = self.get(*reference)
            if reference in seen or found is None:
                continue
            seen.add(reference)
            chosen = pinned if reference[1] is None else explicit
            chosen[found.name] = max(found.version, chosen.get(found.name, 0))
            waiting += found.children
        return explicit | pinned


class DefinitionCache:
    """The outlines of definitions. They never change, so only the newest versions are asked for.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        # With their bytes; the least recently used one is first.
        self._outlines: OrderedDict[tuple[str, int], tuple[Outline, int]] = OrderedDict()
        self._size_bytes = 0
        # The newest versions as of the last query: a guess at the names that the next one needs.
        self._last_newest: dict[str, int] = {}

    async def reach(
        self,
        references: Iterable[Reference],
        *,
        visible: Callable[[str], bool] = lambda _name: True,
        executor: Any = None,
    ) -> Reached:
        """The definitions with these names and versions, and all below them.

        Args:
            references: names and versions.
            visible: whether a definition with this name may be used; others count as missing.
            executor: None is the pool.

        Raises:
            TooLarge: they are more than `MAX_BELOW`.
            PostgresUnavailable: the database is unavailable.
        """
        executor = executor or self._pool
        reached = Reached()
        asked: set[str] = set()
        level = {(name, version) for name, version in references if visible(name)}
        while level:
            if unknown := {name for name, version in level if version is None} - asked:
                # With those below them as of the last time, so that one query is mostly enough.
                unknown |= self._newest_below(level) - asked
                reached.newest |= await _newest(executor, unknown)
                asked |= unknown
                self._last_newest |= reached.newest
            exact = {
                (name, reached.newest.get(name) if version is None else version) for name, version in level
            }
            wanted = {(n, v) for n, v in exact if v is not None} - reached.outlines.keys()
            found = await self._fetch(executor, wanted)
            reached.outlines |= found
            if len(reached.outlines) > MAX_BELOW:
                raise TooLarge(f"more than {MAX_BELOW:,} definitions of child flows: use fewer")
            level = {
                (name, version)
                for outline in found.values()
                for name, version in outline.children
                if visible(name)
            }
        return reached

    def _newest_below(self, level: Iterable[Reference]) -> set[str]:
        """Names below definitions whose newest version will be needed, as far as it is cached."""
        found: set[str] = set()
        seen: set[Reference] = set()
        waiting = [*level]
        while waiting:
            name, version = waiting.pop()
            cached = self._outlines.get((name, version or self._last_newest.get(name, 0)))
            if cached is None or (name, version) in seen:
                continue
            seen.add((name, version))
            found |= {child for child, pinned in cached[0].children if pinned is None}
            waiting += cached[0].children
        return found

    async def _fetch(
        self, executor: Any, wanted: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], Outline]:
        found: dict[tuple[str, int], Outline] = {}
        missing: list[tuple[str, int]] = []
        for key in wanted:
            if key in self._outlines:
                self._outlines.move_to_end(key)
                found[key] = self._outlines[key][0]
            else:
                missing.append(key)
        if missing:
            names_, versions_ = zip(*missing, strict=True)
            rows = await fetch(executor, "flow_definitions.many", list(names_), list(versions_))
            for row in rows:
                outline = Outline.of(orjson.loads(row["definition"]))
                found[outline.name, outline.version] = outline
                self._keep(outline)
        return found

    def _keep(self, outline: Outline) -> None:
        key = (outline.name, outline.version)
        size = len(orjson.dumps(outline.inputs)) + _OUTLINE_BYTES * (1 + len(outline.children))
        self._size_bytes += size - (self._outlines.pop(key)[1] if key in self._outlines else 0)
        self._outlines[key] = (outline, size)
        while self._size_bytes > _CACHE_BYTES:
            _, (_, freed) = self._outlines.popitem(last=False)
            self._size_bytes -= freed
