"""The flows of a pipeline: the code of the service `flows` advances them, on rows in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

import orjson

from penstock.client.flow_models import Flow
from penstock.contracts.context import Context
from penstock.contracts.event import OutboxEntry
from penstock.contracts.task_type import TaskType
from penstock.core.flow.state import FlowStatus
from penstock.errors import Conflict, InvalidRecord, NotFound, RecoveryRefused, one_or_all
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.definitions import Definitions
from penstock.flow_owner.result_lists import Collected, Fetch, ItemResults, ResultLists
from penstock.flow_owner.rounds import apply
from penstock.flows.validation import validate
from penstock.postgres import flow_commands, flow_definitions, flow_documents, flow_views
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.flow_starts import Started, match_events, match_runs
from penstock.settings import Platform
from penstock.submission import EventKind, FlowKind
from penstock.testing.clock import Clock
from penstock.testing.database import Connection
from penstock.testing.flow_tables import FlowTables
from penstock.testing.gateway_statements import GatewayStatements
from penstock.testing.objects import KeptObjects
from penstock.testing.owner_statements import OwnerStatements
from penstock.testing.tables import Tasks
from penstock.testing.task_rows import TaskRow
from penstock.testing.task_statements import TaskStatements

T = TypeVar("T")


class _ListsAtOnce(ResultLists):
    """Lists that are collected within the decision."""

    async def get(self, results: ItemResults, fetch: Fetch, *, is_committed: bool) -> Collected:
        await self.collect(results, fetch)
        return await super().get(results, fetch, is_committed=is_committed)


class _KeptContents(Contents):
    """Contents that are always here, so that no decision waits for the object store."""

    def __init__(self, objects: KeptObjects) -> None:
        super().__init__(objects)
        self.lists = _ListsAtOnce(objects)
        self._all = objects

    def resolve(self, context: Context, root: int) -> Context:  # noqa: ARG002 (nothing is evicted)
        return self._all.value_of(context)

    def refer(self, context: Context, namespace: str, unstored: dict[str, tuple[Context, str]]) -> Context:  # noqa: ARG002 (all are stored)
        return self._all.keep(context, namespace)


class Flows:
    """The flows.

    Args:
        clock: of the pipeline.
        types: the registered task types, by name.
        tasks: the tasks of the pipeline.
        objects: large contexts.
        cancel: cancels tasks and their handlers; returns those that were not final.
        record: receives events and callbacks.

    Attributes:
        tables: the rows.
        connection: by which the code of the services reads and writes them.
    """

    def __init__(
        self,
        clock: Clock,
        types: Mapping[str, TaskType],
        tasks: Tasks,
        objects: KeptObjects,
        cancel: Callable[[Sequence[int]], list[TaskRow]],
        record: Callable[[OutboxEntry], object],
    ) -> None:
        self._types = types
        self._objects = objects
        self._record = record
        self.tables = FlowTables(clock, tasks, cancel)
        kinds = (OwnerStatements, GatewayStatements, TaskStatements)
        connection = Connection(*(kind(self.tables) for kind in kinds))
        # It has the methods of the driver's pool and connection that are used.
        self.connection = cast("Any", connection)
        self._definitions = Definitions()
        self._starts = FlowKind(DefinitionCache(self.connection), objects)
        self._events = EventKind(objects)
        self._contents = _KeptContents(objects)

    def put_definition(self, definition: Mapping[str, Any]) -> None:
        """Stores a definition as the gateway does.

        Raises:
            InvalidRecord: it has a fault; `pointer` is its place.
            Faults: it has several.
            Conflict: the version exists with another content.
        """
        faults = [
            InvalidRecord(fault.message, pointer=fault.pointer)
            for fault in validate(definition, types=self._types.keys(), definitions=self._find)
        ]
        if faults:
            raise one_or_all(faults)
        at_once(flow_definitions.insert(self.connection, definition, None))

    def _find(self, name: str, version: int | None) -> Mapping[str, Any] | None:
        found = at_once(flow_definitions.find(self.connection, name, version))
        return None if found is None else found.definition

    def start(self, raw: Any, schedule: str | None, tick: datetime | None) -> Started:
        """Starts a flow as the gateway does, or with a tick as a schedule does.

        Args:
            raw: as in `flows-submitted.schema.json`.
            schedule: name of the schedule.
            tick: nominal time; None without a schedule.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        kind = self._starts.open_batch()
        found = at_once(kind.store(at_once(kind.read(raw))))
        found = dataclasses.replace(found, schedule=schedule, tick=tick)
        [started] = at_once(kind.insert(self.connection, [found]))
        return started

    def send_event(self, raw: Any) -> bool:
        """Brings an event to the flows that wait for it; returns whether it is new.

        Args:
            raw: as in `flow-events-submitted.schema.json`.

        Raises:
            Invalid: the event is refused; `pointer` is the field at fault.
        """
        event = at_once(self._events.store(at_once(self._events.read(raw))))
        [delivered] = at_once(self._events.insert(self.connection, [event]))
        return delivered.created

    def command(self, flow_id: int, kind: str) -> None:
        """Sends a command to the owner of a flow: pause, resume or cancel.

        Raises:
            NotFound: no flow has this id.
            Conflict: it has ended.
        """
        status = self.get(flow_id).status
        if status is FlowStatus.RUNNING:
            at_once(flow_commands.command(self.connection, [flow_id], kind))
        elif (kind, status) != ("cancel", FlowStatus.CANCELLED):
            raise Conflict(f"flow {flow_id} has already {status}: the command {kind!r} has no effect")

    def recover(self, flow_id: int, nodes: Sequence[str]) -> list[str]:
        """Runs failed or chosen nodes again; returns all that run again.

        Raises:
            NotFound: no flow has this id.
            RecoveryRefused: nothing can be recovered now.
        """
        found = at_once(flow_commands.recovery(self.connection, flow_id, nodes))
        if (refusal := found.refusal) is not None:
            raise RecoveryRefused(
                f"flow {flow_id} cannot be recovered: {refusal.code}", code=refusal.code, nodes=refusal.nodes
            )
        detail = {"nodes": list(nodes), "generation": found.generation}
        at_once(flow_commands.command(self.connection, [flow_id], "recover", detail))
        return found.nodes

    async def advance(self) -> bool:
        """Applies what flows have received, in one transaction; returns whether there was any."""
        inbox, due = self.tables.take_inbox(), self.tables.take_due()
        if not inbox and not due:
            return False
        batch = Batch(self.connection, self._definitions, self._contents, Platform.event_source)
        await apply(batch, cast("Any", inbox), cast("Any", due))
        for entry in batch.outbox:
            self._record(entry)
        if batch.waiting:
            await match_events(self.connection)
        if batch.waiting_runs | batch.ended_runs:
            await match_runs(self.connection)
        return True

    def get(self, flow_id: int) -> Flow:
        """A flow, as the client reads it from the gateway.

        Raises:
            NotFound: no flow has this id.
        """
        if flow_id not in self.tables.flows:
            raise NotFound(f"there is no flow {flow_id}")
        row = flow_views.as_recovered(at_once(flow_views.get(self.connection, flow_id)))
        nodes = at_once(flow_views.nodes(self.connection, row))
        document = flow_documents.detail(row, nodes, at_once(flow_views.history(self.connection, row)))
        for name in ("inputs", "output"):
            if (context := flow_documents.context_of(row, name)) is not None:
                document[name] = self._objects.value_of(context).to_wire(name)[name]
        return Flow.from_wire(orjson.loads(orjson.dumps(document, option=orjson.OPT_UTC_Z)))


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a function of the services, whose statements are answered without waiting."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("a statement waited")
