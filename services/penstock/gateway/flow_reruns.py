"""The starts of reruns, and the versions to which recoveries move flows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.core.access import namespace_of
from penstock.core.flow.outline import Outline
from penstock.core.task import Priority
from penstock.errors import Conflict, InvalidRecord
from penstock.gateway.views import MAX_CONTEXT_BYTES
from penstock.objects import ObjectStore
from penstock.postgres import flow_definitions
from penstock.postgres.flow_commands import Target
from penstock.postgres.flow_definitions import DefinitionCache, Reached
from penstock.postgres.flow_documents import context_of
from penstock.postgres.flow_starts import FlowStart, inputs_of

Version = int | Literal["same", "latest"]


class Reruns:
    """Makes the starts of reruns, and finds the versions for recoveries.

    Args:
        pool: the database.
        objects: has large inputs.
        definitions: the definitions.
    """

    def __init__(
        self, pool: asyncpg.Pool[asyncpg.Record], objects: ObjectStore, definitions: DefinitionCache
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._definitions = definitions

    async def start_of(
        self, flow: Mapping[str, Any] | asyncpg.Record, version: Version, idempotency_key: str | None = None
    ) -> FlowStart:
        """The start that repeats a flow.

        Args:
            flow: of `flow_views.get`, or a row of `flow_views.many`.
            version: that of the flow, with the versions of its child flows; the newest ones; or one
                with the newest child flows.
            idempotency_key: of the new flow.

        Raises:
            Invalid, Faults: the newest version refuses the inputs.
            InvalidRecord: there is no such version.
            Conflict: the definition is missing, or a task has made the flow.
            ObjectsUnavailable: the object store is unavailable.
            PostgresUnavailable: the database is unavailable.
        """
        inputs = context_of(flow, "inputs") or Context.encode({})
        if flow["task_id"] is not None:
            raise Conflict(f"task {flow['task_id']} has made flow {flow['id']}: it cannot be rerun alone")
        if flow["definition_json"] is None:
            raise Conflict(f"version {flow['version']} of the definition {flow['name']} has been removed")
        outline = Outline.of(orjson.loads(flow["definition_json"]))
        versions = orjson.loads(flow["root_versions"]) if flow["root_versions"] else None
        if version != "same":
            newest, reached = await self._reach(flow["name"], version)
            versions = reached.versions_of(newest) or None
            if newest.inputs != outline.inputs:
                inputs = await self._fitted(inputs, newest)
            outline = newest
        callbacks = flow["callbacks"]
        return FlowStart(
            name=outline.name,
            version=outline.version,
            versions=versions,
            unfinished=outline.nodes,
            inputs=inputs,
            priority=Priority(flow["priority"]),
            idempotency_key=idempotency_key,
            events=flow["events"],
            callbacks=None if callbacks is None else subscription.from_columns(callbacks),
            labels=orjson.loads(flow["labels"]) if flow["labels"] else None,
            rerun_of=flow["id"],
            # A rerun is a run of the same tick, for which flows of the tick may wait.
            schedule=flow["schedule"],
            tick=flow["tick"],
        )

    async def target_of(self, flow: Mapping[str, Any], version: Version) -> Target | None:
        """The version to which a recovery moves a flow; None if it is its own.

        Args:
            flow: of `flow_views.get`, with a definition.
            version: its own, the newest, or another one.

        Raises:
            Invalid, Faults: that version refuses the inputs.
            InvalidRecord: there is no such version.
            ObjectsUnavailable: the object store is unavailable.
            PostgresUnavailable: the database is unavailable.
        """
        if version == "same":
            return None
        found, reached = await self._reach(flow["name"], version)
        if found.version == flow["version"]:
            return None
        if found.inputs != Outline.of(orjson.loads(flow["definition_json"])).inputs:
            # The owner stores them again.
            await self._fitted(context_of(flow, "inputs") or Context.encode({}), found)
        stored = await flow_definitions.get(self._pool, found.name, found.version)
        return Target(stored.definition, reached.versions_of(found))

    async def _reach(self, name: str, version: int | Literal["latest"]) -> tuple[Outline, Reached]:
        wanted = None if version == "latest" else version
        reached = await self._definitions.reach([(name, wanted)])
        found = reached.get(name, wanted)
        if found is None:
            raise InvalidRecord(
                f"there is no version {version} of the definition {name!r}: upload it first",
                pointer="/version",
            )
        return found, reached

    async def _fitted(self, inputs: Context, newest: Outline) -> Context:
        """The inputs with new defaults, as a context that PostgreSQL can store."""
        namespace = namespace_of(newest.name)
        if inputs.ref is not None:
            inputs = await self._objects.check_out(inputs, namespace, limit_bytes=MAX_CONTEXT_BYTES)
        given: dict[str, Any] = inputs.decode()
        return await self._objects.check_in(inputs_of(newest, given, "/version"), namespace)
