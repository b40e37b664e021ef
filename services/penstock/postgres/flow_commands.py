"""Commands to flows: rows in the inbox of their owners, and what a recovery would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.core.flow.change import change
from penstock.core.flow.decide import decide
from penstock.core.flow.messages import Recovered, Refuse
from penstock.core.flow.plan import Plan
from penstock.core.flow.state import FINAL_NODES, UNSUCCESSFUL_NODES, FlowStatus, NodeState
from penstock.postgres import flow_views, flows
from penstock.postgres.connection import translated
from penstock.postgres.queries import fetch


class Target(NamedTuple):
    """The version to which a recovery moves a flow.

    Attributes:
        definition: the definition.
        versions: of all definitions below it, by name.
    """

    definition: Mapping[str, Any]
    versions: Mapping[str, int]

    def added(self, pinned: Mapping[str, int]) -> dict[str, int]:
        """The versions that a flow with these ones has not pinned."""
        return {name: version for name, version in self.versions.items() if name not in pinned}


async def command(
    executor: Any, flow_ids: Iterable[int], kind: str, recovery: Mapping[str, Any] | None = None
) -> list[int]:
    """Sends a command to the owners of flows; returns the flows that exist.

    Args:
        executor: a pool, or a connection whose transaction the statement joins.
        flow_ids: the flows.
        kind: pause, resume, cancel or recover.
        recovery: of a recovery: its `nodes` and `generation`, with `version` and `versions` if it
            changes them. Without a generation it is the next one.

    Raises:
        PostgresUnavailable: the command may be sent or not; repeating it has no further effect.
    """
    rows = await fetch(
        executor, "flow_commands.command", list(flow_ids), kind, orjson.dumps(recovery or {}).decode()
    )
    return [row["id"] for row in rows]


class Recovery(NamedTuple):
    """A recovery that has not happened.

    Attributes:
        refusal: why it has no effect; None if it has one.
        nodes: the nodes that would run again.
        generation: the generation that would begin.
    """

    refusal: Refuse | None
    nodes: list[str]
    generation: int


async def recovery(
    pool: asyncpg.Pool[asyncpg.Record], flow_id: int, nodes: Iterable[str], target: Target | None = None
) -> Recovery:
    """Decides a recovery of a flow as its owner would, and changes nothing.

    Args:
        pool: the database.
        flow_id: a flow in the live tables.
        nodes: the chosen nodes; none are all that failed.
        target: the version to which it moves the flow; None is its own.

    Raises:
        NotFound: there is no such flow.
        PostgresUnavailable: the server does not answer.
    """
    with translated():
        # One snapshot: the owner may apply another recovery between two reads.
        async with pool.acquire() as connection, connection.transaction(isolation="repeatable_read"):
            flow = await flow_views.get(connection, flow_id)
            definition = orjson.loads(flow["definition_json"])
            plan, state = Plan.from_wire(definition), flows.state_of(flow)
            rows = await flows.nodes(connection, [(flow_id, name) for name in plan.nodes])
    generation = state.generation + 1
    before: Mapping[str, NodeState] = {name: NodeState() for name in plan.nodes} | {
        name: row.state for (_, name), row in rows.items()
    }
    command = Recovered(generation, frozenset(nodes))
    if target is not None:
        plan = Plan.from_wire(target.definition)
        moved = change(definition, target.definition, plan, state, before, command.nodes)
        if isinstance(moved, Refuse):
            return Recovery(moved, [], generation)
        state, before, command = moved.flow, moved.nodes, replace(command, fresh=moved.fresh)
    decision = decide(plan, state, [command], flow["now"], nodes=before)
    if refusals := [action for action in decision.actions if isinstance(action, Refuse)]:
        return Recovery(refusals[0], [], generation)
    chosen = command.nodes or {name for name, node in before.items() if node.status in UNSUCCESSFUL_NODES}
    if state.status is not FlowStatus.RUNNING:
        # Those that a cancellation, or a failure, kept from starting.
        chosen |= {name for name, node in before.items() if node.status not in FINAL_NODES}
    again = chosen | plan.descendants(frozenset(chosen))
    return Recovery(None, [name for name in plan.nodes if name in again], generation)
