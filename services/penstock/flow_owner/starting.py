"""Starts nodes and items: their tasks, child flows, waits and timers, and the answers of switches.

An expression that fails, fails its node or item, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from penstock.contracts.context import Context
from penstock.core.access import namespace_of
from penstock.core.flow import tick_wait
from penstock.core.flow.messages import (
    Chosen,
    Ended,
    ItemEnded,
    Listed,
    OpenItems,
    Recovered,
    ReopenItems,
    Start,
)
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import Outcome
from penstock.core.flow.waiting import event_problem
from penstock.core.task import Priority
from penstock.errors import InvalidExpression, NotFound
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.evaluation import Item, reads_item
from penstock.postgres.flow_writes import NewChild, NewLimit, NewNote, NewTask, NewWait
from penstock.postgres.flows import FlowRow
from penstock.postgres.queries import execute, fetch, fetchval

# Most items of a list: their numbers are integers in the database, and each has a task.
MAX_ITEMS = 1_000_000
# Characters of a text of a child, as the SDK allows.
MAX_TEXT = 200


async def start(batch: Batch, flow: FlowRow, action: Start) -> None:
    """Starts a node, or ends it if its expressions fail."""
    node = batch.definition(flow).nodes[action.node]
    await batch.load_nodes((flow.id, name) for name in batch.definition(flow).reads(action.node))
    try:
        match action.kind:
            case NodeKind.TASK:
                batch.tasks.append(_task(batch, flow, action.node, action.generation, node))
            case NodeKind.FLOW:
                await _start_child(batch, flow, action, node)
            case NodeKind.SWITCH:
                batch.add(flow.id, Chosen(action.node, action.generation, _choose(batch, flow, node)))
            case NodeKind.WAIT:
                _wait(batch, flow, action, node)
            case NodeKind.TIMER:
                _set_timer(batch, flow, action, node)
            case NodeKind.MAP:
                _list(batch, flow, action, node)
    except (InvalidExpression, NotFound) as error:
        batch.add(flow.id, Ended(action.node, action.generation, Outcome.FAILED, str(error)))


async def open_items(batch: Batch, flow: FlowRow, action: OpenItems) -> None:
    """Starts the children of the next items of a map."""
    indexes = range(action.first, action.first + action.count)
    await _open(batch, flow, action.node, action.generation, indexes)


async def reopen_items(batch: Batch, flow: FlowRow, action: ReopenItems) -> None:
    """Starts items of a map again that did not succeed in an earlier generation.

    A late result may have made one of them succeed since; then it has ended already.
    """
    row = batch.nodes[flow.id, action.node]
    assert row.state.items is not None
    each = batch.definition(flow).nodes[action.node]["each"]
    await batch.write()
    # The cursor may have moved in the same decision; items behind it have no child yet.
    items = {
        "flow_id": flow.id,
        "node": action.node,
        "generation": action.generation,
        "below": row.state.items.opened,
        "most": action.count,
    }
    if each["kind"] == NodeKind.TASK:
        found = await fetch(batch.connection, "flows.reopen_tasks", **items)
        indexes = [record["item"] for record in found]
        await _open(batch, flow, action.node, action.generation, indexes)
    else:
        found = await fetch(batch.connection, "flows.reopen_flows", **items)
        indexes = [record["item"] for record in found]
        continued = {record["id"] for record in found if record["id"] is not None}
        await _continue(batch, continued, action.generation)
        missing = [record["item"] for record in found if record["id"] is None]
        await _open(batch, flow, action.node, action.generation, missing)
    for number in range(action.count - len(indexes)):
        batch.add(flow.id, ItemEnded(action.node, -1 - number, action.generation, Outcome.SUCCEEDED))


async def _open(batch: Batch, flow: FlowRow, name: str, generation: int, indexes: Sequence[int]) -> None:
    each = batch.definition(flow).nodes[name]["each"]
    await batch.load_nodes((flow.id, read) for read in batch.definition(flow).reads(name))
    values = batch.scope(flow).resolved(batch.nodes[flow.id, name].list)
    batch.work += len(indexes)
    if "spawned" in each:
        await _load_types(batch, [values[index] for index in indexes])
    shared = _SharedInput()
    for index in indexes:
        item = Item(values[index], index)
        try:
            if "spawned" in each:
                batch.tasks.append(_spawned(batch, flow, name, generation, item))
            elif each["kind"] == NodeKind.TASK:
                batch.tasks.append(_task(batch, flow, name, generation, each, item, shared))
            else:
                batch.children.append(await _child(batch, flow, name, generation, each, item, shared))
        except (InvalidExpression, NotFound) as error:
            if "spawned" in each and not batch.nodes[flow.id, name].state.reason:
                row = batch.changed_node(flow, name)
                reason = error.reason if isinstance(error, InvalidExpression) else str(error)
                row.state = row.state._replace(reason=reason)
            batch.add(flow.id, ItemEnded(name, index, generation, Outcome.FAILED))


class _SharedInput:
    """The input of items whose expression does not read the item, so they all have the same.

    It is evaluated, encoded and stored once for a chunk of items: it may have megabytes.
    """

    def __init__(self) -> None:
        self._found: Context | None = None

    def get(self, text: str | None, evaluate: Callable[[], Context]) -> Context:
        """The input of an item; errors as `evaluate`."""
        if self._found is None:
            found = evaluate()
            if text is not None and reads_item(text):
                return found
            self._found = found
        return self._found


def _task(
    batch: Batch,
    flow: FlowRow,
    name: str,
    generation: int,
    node: Mapping[str, Any],
    item: Item | None = None,
    shared: _SharedInput | None = None,
) -> NewTask:
    scope, text = batch.scope(flow), node.get("input")
    shared = shared or _SharedInput()
    return NewTask(
        type=node["type"],
        stage=node.get("stage"),
        priority=int(Priority[node.get("priority", Priority.MEDIUM.name)]),
        context=shared.get(text, lambda: scope.context(text, namespace_of(node["type"]), item)),
        key=scope.key(node.get("key"), item),
        flow=flow,
        node=name,
        generation=generation,
        item=item.index if item else None,
    )


async def _load_types(batch: Batch, children: Iterable[Any]) -> None:
    names = {
        child["type"] for child in children if isinstance(child, dict) and isinstance(child.get("type"), str)
    }
    if unknown := names - batch.types:
        found = await fetch(batch.connection, "flows.known_types", sorted(unknown))
        batch.types |= {record["name"] for record in found}


def _spawned(batch: Batch, flow: FlowRow, name: str, generation: int, item: Item) -> NewTask:
    """The task of a child that a stage has named, with its type, context and further fields."""
    child = item.value
    if not isinstance(child, dict) or (type_name := _text_of(item, "type")) is None:
        raise InvalidExpression(f"child {item.index} names no task type")
    # First, because the stage must not learn which types another namespace has.
    if namespace_of(type_name) != namespace_of(flow.name):
        raise InvalidExpression(f"child {item.index}: the type {type_name!r} is in another namespace")
    if type_name not in batch.types:
        raise InvalidExpression(f"child {item.index}: there is no task type {type_name!r}")
    priority = _text_of(item, "priority")
    if priority is not None and priority not in Priority.__members__:
        raise InvalidExpression(
            f"child {item.index} has a priority that is none of {', '.join(Priority.__members__)}"
        )
    scope = batch.scope(flow)
    return NewTask(
        type=type_name,
        stage=_text_of(item, "stage"),
        priority=flow.priority if priority is None else int(Priority[priority]),
        context=scope.encoded(child.get("context"), namespace_of(type_name), ""),
        key=_text_of(item, "key"),
        flow=flow,
        node=name,
        generation=generation,
        item=item.index,
    )


def _text_of(child: Item, name: str) -> str | None:
    """A field of a child. A worker in another language may name anything, and no schema has it."""
    value = child.value.get(name)
    if value is None or (isinstance(value, str) and 0 < len(value) <= MAX_TEXT and "\0" not in value):
        return value
    raise InvalidExpression(
        f"child {child.index} has a {name} that is no text of 1 to {MAX_TEXT} characters without NUL"
    )


async def _start_child(batch: Batch, flow: FlowRow, action: Start, node: Mapping[str, Any]) -> None:
    if action.recovers:
        child = await fetchval(batch.connection, "flows.child", flow.id, action.node, None)
        if child is not None:
            await _continue(batch, {child}, action.generation)
            return
    batch.children.append(await _child(batch, flow, action.node, action.generation, node))


async def _continue(batch: Batch, children: set[int], generation: int) -> None:
    """Recovers child flows in place, as children of a new generation of their node."""
    if not children:
        return
    await batch.load_flows(children)
    await execute(batch.connection, "flows.adopt", sorted(children), [generation] * len(children))
    for child_id in sorted(children):
        child = batch.loaded[child_id]
        assert child.parent is not None
        child.parent = replace(child.parent, generation=generation)
        next_generation = child.state.generation + 1
        detail = {"generation": next_generation, "in_place": True}
        note = NewNote(root_id=child.root_id, flow_id=child_id, kind="recover", detail=detail)
        batch.recovering.add(child_id)
        batch.send(note, Recovered(next_generation, in_place=True))


async def _child(
    batch: Batch,
    flow: FlowRow,
    name: str,
    generation: int,
    node: Mapping[str, Any],
    item: Item | None = None,
    shared: _SharedInput | None = None,
) -> NewChild:
    child = node["flow"]
    version = node.get("version") or flow.versions.get(child)
    if version is None:
        raise NotFound(f"there was no definition {child!r} when the flow started")
    await batch.definitions.load(batch.connection, {(child, int(version))})
    definition = batch.definitions.get(child, int(version))
    scope, text = batch.scope(flow), node.get("input")

    def inputs() -> Context:
        given = {} if text is None else scope.value(text, item)
        complete = with_defaults(given, definition.inputs, child, text or "")
        return scope.encoded(complete, namespace_of(child), text or "")

    return NewChild(
        parent=flow,
        node=name,
        generation=generation,
        item=item.index if item else None,
        name=child,
        version=int(version),
        unfinished=len(definition.nodes),
        inputs=(shared or _SharedInput()).get(text, inputs),
    )


def with_defaults(
    given: Any, declared: Mapping[str, Mapping[str, Any]], name: str, text: str
) -> dict[str, Any]:
    """The inputs of a child flow: those that its parent gives, and defaults.

    Raises:
        InvalidExpression: they are not those that its definition declares.
    """
    if not isinstance(given, dict):
        raise InvalidExpression(f"the inputs of flow {name!r} are an object", expression=text)
    unknown = sorted(given.keys() - declared.keys())
    missing = sorted(key for key, each in declared.items() if "default" not in each and key not in given)
    if unknown:
        raise InvalidExpression(f"flow {name!r} has no input {unknown[0]!r}", expression=text)
    if missing:
        raise InvalidExpression(f"flow {name!r} needs the input {missing[0]!r}", expression=text)
    return {key: given[key] if key in given else each["default"] for key, each in declared.items()}


def _choose(batch: Batch, flow: FlowRow, node: Mapping[str, Any]) -> str:
    for case in node["cases"]:
        value = batch.scope(flow).value(case["when"])
        if not isinstance(value, bool):
            raise InvalidExpression("a condition is true or false", expression=case["when"])
        if value:
            return str(case["case"])
    return str(node["else"])


def _wait(batch: Batch, flow: FlowRow, action: Start, node: Mapping[str, Any]) -> None:
    namespace = namespace_of(flow.name)
    if "flow" in node:
        namespace = tick_wait.NAMESPACE
        event, key = _awaited_run(flow, node["flow"])
        batch.waiting_runs.add(flow.id)
    else:
        # A stage has named the event.
        if (problem := event_problem(flow.name, node["event"])) is not None:
            raise NotFound(problem)
        event, key = node["event"], batch.scope(flow).key(node.get("key")) or ""
        batch.waiting.add(flow.id)
    batch.waits.append(NewWait(flow, action.node, action.generation, namespace, event, key))


def _awaited_run(flow: FlowRow, awaited: str) -> tuple[str, str]:
    problem = tick_wait.problem_of(flow.name, awaited)
    if problem is None and flow.tick is None:
        problem = "the flow has no tick, because no schedule started it: start it by a schedule"
    if problem is not None:
        raise NotFound(f"there can be no run of {awaited!r} to wait for: {problem}")
    assert flow.tick is not None
    return tick_wait.awaited_run(awaited, flow.tick)


def _set_timer(batch: Batch, flow: FlowRow, action: Start, node: Mapping[str, Any]) -> None:
    assert batch.now is not None
    if "until" in node:
        at = batch.scope(flow).moment(node["until"])
    else:
        at = batch.now + timedelta(seconds=node["delay_s"])
    batch.limits.append(NewLimit(flow, action.node, action.generation, "timer", at))


def _list(batch: Batch, flow: FlowRow, action: Start, node: Mapping[str, Any]) -> None:
    found, count = batch.scope(flow).listed(node["items"], namespace_of(flow.name))
    if count > MAX_ITEMS:
        raise InvalidExpression(
            f"{count:,} items; {MAX_ITEMS:,} is the limit: nest two maps", expression=node["items"]
        )
    batch.changed_node(flow, action.node).list = found
    batch.add(flow.id, Listed(action.node, action.generation, count))
