"""The working copy of one transaction: the rows of flows that it has read, and those to write."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.contracts.context import Context
from penstock.contracts.event import OutboxEntry
from penstock.core.flow.messages import Began, Message
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.definitions import Definition, Definitions
from penstock.flow_owner.evaluation import Scope
from penstock.flow_owner.result_lists import ItemResults
from penstock.postgres import flow_writes, flows
from penstock.postgres.flow_writes import NewChild, NewLimit, NewNote, NewTask, NewWait, Wake
from penstock.postgres.flows import SHARDS, FlowRow, NodeRow
from penstock.postgres.outbox import PendingEvent, enqueue

NodeKey = tuple[int, str]

# Child flows in each other, as validation permits them.
_MAX_LEVELS = 100


@dataclass
class Batch:
    """The working copy of a transaction.

    Attributes:
        connection: inside the transaction, and inside `translated`.
        definitions: those of this process.
        contents: those of this process.
        source: of CloudEvents (see `Platform`).
        budget: decisions, and items to open, after which the transaction ends: a message to a
            parent or child in a further round becomes a row of the inbox.
        work: decisions made, and items opened.
        loaded: flows that are locked, by id.
        nodes: nodes that are loaded, by flow and name.
        next: what flows receive in the next round.
        outputs: outputs of nodes that may end, by flow, node and generation.
        children: child flows to insert.
        tasks: tasks to insert.
        limits: moments to write.
        waits: waits to write.
        wakes: waiting tasks to wake.
        types: task types that children of tasks name, and that exist.
        notes: rows of the inbox to write.
        events: to enqueue.
        ended: flows whose limits and waits are to be deleted.
        unstored: objects to store before the commit, by root flow and key.
        uncollected: lists of results to collect before the decision, by root flow.
        postponed: flows that need lists, which are decided no further.
        ended_items: maps whose child flows have ended in this transaction, by flow and name.
        outbox: to be published after the commit.
        waiting: flows with new waits, whose events may be there already.
        waiting_runs: flows with new waits for other flows, which may have ended already.
        ended_runs: flows of schedules that have ended, for which other flows may wait.
        recovering: flows with a recovery in this transaction, which may not run yet.
        noted: shards whose inbox may have rows.
        first_limit: the earliest moment that was written.
        now: time of the transaction; None before a flow is locked.
    """

    connection: Any
    definitions: Definitions
    contents: Contents
    source: str
    budget: int = sys.maxsize
    work: int = 0
    loaded: dict[int, FlowRow] = field(default_factory=dict)
    nodes: dict[NodeKey, NodeRow] = field(default_factory=dict)
    next: dict[int, list[Message]] = field(default_factory=dict)
    outputs: dict[tuple[int, str, int], Context] = field(default_factory=dict)
    children: list[NewChild] = field(default_factory=list)
    tasks: list[NewTask] = field(default_factory=list)
    limits: list[NewLimit] = field(default_factory=list)
    waits: list[NewWait] = field(default_factory=list)
    wakes: list[Wake] = field(default_factory=list)
    types: set[str] = field(default_factory=set)
    notes: list[NewNote] = field(default_factory=list)
    events: list[PendingEvent] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    unstored: dict[int, dict[str, tuple[Context, str]]] = field(default_factory=dict)
    uncollected: dict[int, list[ItemResults]] = field(default_factory=dict)
    postponed: set[int] = field(default_factory=set)
    ended_items: set[NodeKey] = field(default_factory=set)
    outbox: list[OutboxEntry] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    waiting_runs: set[int] = field(default_factory=set)
    ended_runs: set[int] = field(default_factory=set)
    recovering: set[int] = field(default_factory=set)
    noted: set[int] = field(default_factory=set)
    first_limit: datetime | None = None
    now: datetime | None = None

    def __post_init__(self) -> None:
        self._scopes: dict[int, Scope] = {}
        self._definitions_of: dict[int, Definition] = {}
        self._changed_flows: set[int] = set()
        self._changed_nodes: set[NodeKey] = set()
        # Nodes of ancestors, to be read with the next ones.
        self._expected: set[NodeKey] = set()

    def add(self, flow_id: int, *messages: Message) -> None:
        """Adds what a flow receives in the next round."""
        self.next.setdefault(flow_id, []).extend(messages)

    def send(self, note: NewNote, *messages: Message) -> None:
        """Sends messages to a relative: in the next round, or by its inbox if enough is decided."""
        if self.work < self.budget:
            self.add(note.flow_id, *messages)
        else:
            self.notes.append(note)

    def definition(self, flow: FlowRow) -> Definition:
        """The definition of a loaded flow.

        Raises:
            NotFound: it does not exist.
        """
        found = self._definitions_of.get(flow.id)
        if found is None:
            if flow.definition is not None:
                found = Definition(flow.definition)
            else:
                found = self.definitions.get(flow.name, flow.version)
            self._definitions_of[flow.id] = found
        return found

    def scope(self, flow: FlowRow) -> Scope:
        """The values that the expressions of a loaded flow read."""
        if flow.id not in self._scopes:
            self._scopes[flow.id] = Scope(flow, self.nodes, self.contents, self.unstored)
        return self._scopes[flow.id]

    def changed(self, flow: FlowRow) -> FlowRow:
        """A loaded flow, to be changed and written."""
        self._changed_flows.add(flow.id)
        return flow

    def forget(self, flow: FlowRow) -> None:
        """Forgets what follows from the version of a flow, and from its inputs."""
        self._definitions_of.pop(flow.id, None)
        self._scopes.pop(flow.id, None)

    def changed_node(self, flow: FlowRow, name: str) -> NodeRow:
        """A loaded node, to be changed and written."""
        self._changed_nodes.add((flow.id, name))
        return self.nodes[flow.id, name]

    async def load_flows(self, ids: Iterable[int]) -> None:
        """Locks flows and the ancestors that may end with them, and reads their definitions."""
        wanted = set(ids) - self.loaded.keys()
        if not wanted:
            return
        levels = min(_MAX_LEVELS, (self.budget - self.work) // len(wanted))
        found, now = await flows.lock(self.connection, wanted, max(0, levels))
        for flow_id, flow in found.items():
            # An ancestor that was loaded before may have changed since.
            self.loaded.setdefault(flow_id, flow)
        self.now = self.now or now
        await self.definitions.load(
            self.connection, {(flow.name, flow.version) for flow in found.values() if flow.definition is None}
        )
        for flow in found.values():
            if flow.parent is not None and flow.parent.flow_id in found:
                self._expected.update(self.reads(self.loaded[flow.parent.flow_id], [flow.parent.node]))

    def reads(self, flow: FlowRow, names: Collection[str]) -> Iterator[NodeKey]:
        """Those of these nodes, and the nodes that the flow's expressions read when they end."""
        definition = self.definition(flow)
        for name in names:
            yield flow.id, name
            for read in definition.reads(name):
                yield flow.id, read
        if flow.state.unfinished <= len(names):
            for read in definition.reads(None):
                yield flow.id, read

    async def load_nodes(self, keys: Iterable[NodeKey]) -> None:
        """Reads nodes that are not loaded yet."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self.nodes]
        if wanted:
            wanted += [key for key in self._expected.difference(wanted) if key not in self.nodes]
            self._expected.clear()
            found = await flows.nodes(self.connection, wanted)
            self.nodes |= {key: found.get(key) or NodeRow() for key in wanted}

    async def insert_children(self) -> None:
        """Inserts the child flows so far; they begin in the next round."""
        if not self.children:
            return
        children, self.children = self.children, []
        for child in await flow_writes.insert_children(self.connection, children):
            self.loaded[child.id] = child
            self.send(NewNote(root_id=child.root_id, flow_id=child.id, kind="began"), Began())
            # No node of it has a row.
            self.nodes |= {(child.id, name): NodeRow() for name in self.definition(child).nodes}

    async def write(self) -> None:
        """Writes what has changed so far."""
        await self.insert_children()
        if self._changed_nodes:
            await flow_writes.write_nodes(
                self.connection, {key: self.nodes[key] for key in sorted(self._changed_nodes)}
            )
        if self.limits:
            await flow_writes.write_limits(self.connection, self.limits)
            first = min(limit.at for limit in self.limits)
            self.first_limit = first if self.first_limit is None else min(first, self.first_limit)
        if self.waits:
            await flow_writes.write_waits(self.connection, self.waits)
        if self._changed_flows:
            # Behind the limits and waits, because it deletes those of flows that have ended.
            await flow_writes.write_flows(
                self.connection,
                [self.loaded[flow_id] for flow_id in sorted(self._changed_flows)],
                self.ended,
            )
        if self.tasks:
            await flow_writes.insert_tasks(self.connection, self.tasks)
        if self.notes:
            await flow_writes.write_inbox(self.connection, self.notes)
            self.noted |= {note.root_id % SHARDS for note in self.notes}
        if self.wakes:
            self.events += await flow_writes.wake(self.connection, self.wakes)
        if self.events:
            self.outbox.append(await enqueue(self.connection, self.events, self.source))
        self._changed_nodes, self._changed_flows = set(), set()
        self.tasks, self.limits, self.waits, self.notes = [], [], [], []
        self.ended, self.events, self.wakes = [], [], []
