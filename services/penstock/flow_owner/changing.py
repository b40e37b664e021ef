"""Moves flows to another version of their definition, before a recovery is applied."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.access import namespace_of
from penstock.core.flow.change import change
from penstock.core.flow.decide import decide
from penstock.core.flow.messages import Recovered, Refuse
from penstock.errors import InvalidExpression
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.starting import with_defaults
from penstock.postgres import flow_writes
from penstock.postgres.flows import FlowRow
from penstock.postgres.queries import execute


async def change_version(batch: Batch, flow: FlowRow, command: Recovered) -> Recovered | None:
    """Moves a flow to the version of a recovery; returns the recovery that remains.

    A recovery that does not fit has no effect, like any command that is refused: the gateway has
    answered why, unless the flow has changed since.

    Raises:
        NotFound: the definition has been deleted.
        ContentsMissing: the inputs must be fetched first.
    """
    assert batch.now is not None
    if command.version in (None, flow.version) or command.generation != flow.state.generation + 1:
        return replace(command, version=None)
    assert command.version is not None
    await batch.write()
    old = batch.definition(flow)
    await batch.definitions.load(batch.connection, {(flow.name, command.version)})
    new = batch.definitions.get(flow.name, command.version)
    await batch.load_nodes((flow.id, name) for name in {*old.nodes, *new.nodes})
    before = {name: batch.nodes[flow.id, name].state for name in old.nodes}
    moved = change(old.document, new.document, new.plan, flow.state, before, command.nodes)
    if isinstance(moved, Refuse):
        return None
    remaining = replace(command, version=None, fresh=moved.fresh)
    decision = decide(new.plan, moved.flow, [remaining], batch.now, nodes=moved.nodes)
    if any(isinstance(action, Refuse) for action in decision.actions):
        return None
    inputs = flow.inputs
    if new.inputs != old.inputs:
        try:
            given = with_defaults(batch.scope(flow).resolved(inputs), new.inputs, flow.name, "inputs")
            inputs = batch.scope(flow).encoded(given, namespace_of(flow.name), "inputs")
        except InvalidExpression:
            return None
    await execute(batch.connection, "flows.keep_history", flow.id, sorted(moved.gone), flow.state.generation)
    await execute(batch.connection, "flows.delete_nodes", flow.id, sorted(moved.gone))
    for name in moved.gone:
        batch.nodes.pop((flow.id, name))
    for name, state in moved.nodes.items():
        if state != batch.nodes[flow.id, name].state:
            batch.changed_node(flow, name).state = state
    flow.version, flow.inputs, flow.state = command.version, inputs, moved.flow
    flow.versions = {**flow.versions, **command.versions}
    await flow_writes.write_version(batch.connection, flow)
    batch.forget(batch.changed(flow))
    return remaining
