"""Builds flow definitions in Python; the result is the JSON of the schema, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Join = Literal["all", "all_done", "any"] | Mapping[Literal["k"], int]
Priority = Literal["HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"]


@dataclass(frozen=True, slots=True)
class Cel:
    """An expression in CEL.

    `expression["name"]` selects a field. As text it is its source, for use in an f-string.

    Attributes:
        text: its source.
    """

    text: str

    def __getitem__(self, name: str | int) -> Cel:
        if isinstance(name, str) and name.isidentifier() and name.isascii() and name not in _RESERVED:
            return Cel(f"{self.text}.{name}")
        return Cel(f"{self.text}[{to_cel(name)}]")

    def __str__(self) -> str:
        return self.text


# Words of CEL that cannot follow a dot.
_RESERVED = frozenset({"true", "false", "null", "in"})

# Data of an expression: JSON, with expressions anywhere in it.
Value = Any

INPUTS = Cel("inputs")
ITEM = Cel("item")
INDEX = Cel("index")


def cel(text: str) -> Cel:
    """An expression from its source: `cel(f"size({files.output}) > 10")`."""
    return Cel(text)


def to_cel(value: Value) -> str:  # noqa: C901, PLR0911 (one case per type of JSON)
    """The expression for JSON data that may contain expressions.

    Raises:
        TypeError, ValueError: the data is not JSON; integers have at most 64 bits.
    """
    match value:
        case Cel(text=text):
            return text
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if -(2**63) <= value < 2**64:
            return str(value) if value < 2**63 else f"{value}u"
        case float() if math.isfinite(value):
            return repr(value)
        case str():
            # An escaped surrogate pair is no character of CEL.
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            raise ValueError(f"{value} is not JSON, or has more than 64 bits: write it as a string")
        case Mapping():
            wrong = [name for name in value if not isinstance(name, str)]
            if wrong:
                raise TypeError(f"the name {wrong[0]!r} is not a string")
            return "{" + ", ".join(f"{to_cel(name)}: {to_cel(part)}" for name, part in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(to_cel, value)) + "]"
    raise TypeError(f"{type(value).__name__} is not JSON")


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a switch, for `after`."""

    switch: str
    case: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node that has been added to a flow.

    Attributes:
        name: its name.
    """

    name: str

    @property
    def output(self) -> Cel:
        """The result of the node, for expressions of nodes behind it. That of a map is a list."""
        return Cel(f"nodes.{self.name}.output")

    @property
    def status(self) -> Cel:
        """How the node ended, for expressions behind `all_done` and `any`."""
        return Cel(f"nodes.{self.name}.status")


@dataclass(frozen=True, slots=True)
class Switch(Node):
    """A switch; `switch["case"]` is an edge for `after`."""

    def __getitem__(self, case: str) -> Case:
        return Case(self.name, case)


@dataclass(frozen=True, slots=True)
class TaskOf:
    """The task that a map runs for each item; the fields are those of `Flow.task`."""

    type: str
    input: Value = None
    stage: str | None = None
    priority: Priority | None = None
    key: Value = None

    def to_wire(self) -> dict[str, Any]:
        """The `each` of a map."""
        return _fields(
            kind="task",
            type=self.type,
            stage=self.stage,
            priority=self.priority,
            key=_expression(self.key),
            input=_expression(self.input),
        )


@dataclass(frozen=True, slots=True)
class FlowOf:
    """The child flow that a map runs for each item; the fields are those of `Flow.flow`."""

    flow: str
    version: int | None = None
    input: Value = None

    def to_wire(self) -> dict[str, Any]:
        """The `each` of a map."""
        return _fields(kind="flow", flow=self.flow, version=self.version, input=_expression(self.input))


class Flow:
    """A definition in the making.

    Each method that adds a node takes `after`, the nodes (or cases of switches) that must end
    first, and `join`, which says which of them start the node. Inputs, keys, lists and conditions
    are JSON data with expressions anywhere in it. A plain string is text, `cel(…)` an expression.
    Limits are seconds.

    Args:
        name: name of the definition.
        version: its version; a version never changes.
        description: what the flow is for.
        on_failure: `stop` (default) starts nothing more after a failure, `continue` goes on with
            nodes that do not depend on the failed one.
        timeout_s: seconds from the flow's start to its end.
        warn_after_s: seconds after which an event reports that the flow is still running.
    """

    def __init__(
        self,
        name: str,
        *,
        version: int,
        description: str | None = None,
        on_failure: Literal["stop", "continue"] | None = None,
        timeout_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> None:
        self._head = _fields(
            flow=name,
            version=version,
            description=description,
            on_failure=on_failure,
            timeout_s=timeout_s,
            warn_after_s=warn_after_s,
        )
        self._inputs: dict[str, Any] = {}
        self._nodes: dict[str, Any] = {}
        self._output: str | None = None

    def declare(self, name: str, *, default: Any = ..., description: str | None = None) -> Cel:
        """Declares an input; without a default each run must name it.

        Raises:
            ValueError: the input is declared already.
        """
        if name in self._inputs:
            raise ValueError(f"there is an input {name!r} already: declare it once")
        declared = _fields(description=description)
        if default is not ...:
            declared["default"] = default
        self._inputs[name] = declared
        return INPUTS[name]

    def task(
        self,
        name: str,
        *,
        type: str,  # noqa: A002 (the word of the definition, of the API and of the command line)
        input: Value = None,  # noqa: A002 (as above)
        stage: str | None = None,
        priority: Priority | None = None,
        key: Value = None,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
        start_within_s: float | None = None,
        finish_within_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> Node:
        """Runs a task of a type; `key` is its concurrency key."""
        each = TaskOf(type, input, stage, priority, key).to_wire()
        limits = _fields(
            start_within_s=start_within_s, finish_within_s=finish_within_s, warn_after_s=warn_after_s
        )
        return Node(self._add(name, each, after, join, limits))

    def flow(
        self,
        name: str,
        *,
        flow: str,
        version: int | None = None,
        input: Value = None,  # noqa: A002 (the word of the definition)
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
        finish_within_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> Node:
        """Runs another definition as a child flow; without `version` the newest."""
        limits = _fields(finish_within_s=finish_within_s, warn_after_s=warn_after_s)
        return Node(self._add(name, FlowOf(flow, version, input).to_wire(), after, join, limits))

    def switch(
        self,
        name: str,
        *,
        cases: Mapping[str, Cel],
        otherwise: str,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
    ) -> Switch:
        """Takes the first case whose condition is true, or else the case `otherwise`."""
        listed = [{"case": case, "when": to_cel(when)} for case, when in cases.items()]
        node = {"kind": "switch", "cases": listed, "else": otherwise}
        return Switch(self._add(name, node, after, join, {}))

    def wait(
        self,
        name: str,
        *,
        event: str,
        key: Value = None,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
        finish_within_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> Node:
        """Waits for an event, whose data is the node's output."""
        node = _fields(kind="wait", event=event, key=_expression(key))
        limits = _fields(finish_within_s=finish_within_s, warn_after_s=warn_after_s)
        return Node(self._add(name, node, after, join, limits))

    def wait_for_run(
        self,
        name: str,
        *,
        flow: str,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
        finish_within_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> Node:
        """Waits for the run of another definition of the same schedule tick, with its output."""
        node = _fields(kind="wait", flow=flow, tick="same")
        limits = _fields(finish_within_s=finish_within_s, warn_after_s=warn_after_s)
        return Node(self._add(name, node, after, join, limits))

    def timer(
        self,
        name: str,
        *,
        delay_s: float | None = None,
        until: Cel | None = None,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
    ) -> Node:
        """Ends `delay_s` seconds after its start, or at the moment `until`."""
        node = _fields(kind="timer", delay_s=delay_s, until=_expression(until))
        return Node(self._add(name, node, after, join, {}))

    def map(
        self,
        name: str,
        *,
        items: Value,
        each: TaskOf | FlowOf,
        parallel: int | None = None,
        tolerate: int | None = None,
        k: int | None = None,
        after: Sequence[Node | Case] = (),
        join: Join | None = None,
        finish_within_s: float | None = None,
        warn_after_s: float | None = None,
    ) -> Node:
        """Runs `each` for each item of a list, `parallel` of them at a time.

        It succeeds when all items but `tolerate` have, or when `k` have.
        """
        node = _fields(
            kind="map",
            items=to_cel(items),
            each=each.to_wire(),
            parallel=parallel,
            tolerate=tolerate,
            k=k,
        )
        limits = _fields(finish_within_s=finish_within_s, warn_after_s=warn_after_s)
        return Node(self._add(name, node, after, join, limits))

    def output(self, value: Value) -> None:
        """Sets the result of the flow."""
        self._output = to_cel(value)

    def definition(self) -> dict[str, Any]:
        """The definition as JSON. `penstock.flows.validation.validate` finds its faults."""
        found = {**self._head, **_fields(inputs=self._inputs or None), "nodes": self._nodes}
        copy: dict[str, Any] = json.loads(json.dumps({**found, **_fields(output=self._output)}))
        return copy

    def _add(
        self,
        name: str,
        node: Mapping[str, Any],
        after: Sequence[Node | Case],
        join: Join | None,
        limits: Mapping[str, Any],
    ) -> str:
        if name in self._nodes:
            raise ValueError(f"there is a node {name!r} already: give this one another name")
        edges = [f"{edge.switch}.{edge.case}" if isinstance(edge, Case) else edge.name for edge in after]
        self._nodes[name] = {**node, **_fields(after=edges or None, join=join), **limits}
        return name


def _expression(value: Value) -> str | None:
    return None if value is None else to_cel(value)


def _fields(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
