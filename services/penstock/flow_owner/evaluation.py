"""Evaluates the expressions of flows: what they read, and what becomes of their values."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.cel import Expression, compile_expression
from penstock.contracts.context import ContentType, Context
from penstock.core.flow.state import NodeStatus
from penstock.errors import InvalidExpression, InvalidRecord
from penstock.flow_owner.contents import Contents
from penstock.flows.expressions import FLOW_VARIABLES, ITEM_VARIABLES
from penstock.postgres.flows import NO_INPUTS, FlowRow, NodeRow

_NOTHING: Any = object()
_NULL = Context.encode(None)

# As the schema of a submitted task allows.
_MAX_KEY_LENGTH = 200
# Characters of a value in an error.
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Item:
    """The item of a map that an expression is evaluated for."""

    value: Any
    index: int


_ANY_ITEM = Item(None, 0)


class Scope:
    """The values that the expressions of one flow read, during one transaction.

    Args:
        flow: the flow.
        nodes: the loaded nodes by flow and name; they may change between two evaluations.
        contents: resolves references.
        unstored: objects to store before the commit, by root flow and key.
    """

    def __init__(
        self,
        flow: FlowRow,
        nodes: Mapping[tuple[int, str], NodeRow],
        contents: Contents,
        unstored: dict[int, dict[str, tuple[Context, str]]],
    ) -> None:
        self._flow = flow
        self._nodes = nodes
        self._contents = contents
        self._unstored = unstored
        self._values: dict[Context, Any] = {}

    def value(self, text: str, item: Item | None = None) -> Any:
        """The value of an expression, as JSON.

        Raises:
            InvalidExpression: it cannot be evaluated.
            ContentsMissing: an object must be fetched first.
        """
        expression = _compile(text, item)
        if item is not None and text.strip() == "item":
            return item.value
        found = self._input(text)
        if found is not _NOTHING:
            return found
        return expression.evaluate(self._variables(expression, item))

    def context(self, text: str | None, namespace: str, item: Item | None = None) -> Context:
        """The value of an expression as the context of a task, or the inputs of a flow.

        An expression that only names the output of a node passes its reference on.

        Args:
            text: the expression; None is `null`.
            namespace: of the task or flow that gets it.
            item: of a map.

        Raises:
            InvalidExpression: it cannot be evaluated, or its value is no context.
            ContentsMissing: an object must be fetched first.
        """
        if text is None:
            return _NULL
        passed = self._passed(text)
        if passed is not None:
            if passed.ref is None or passed.ref.namespace == namespace:
                return passed
            return self.refer(self._contents.resolve(passed, self._flow.root_id), namespace)
        return self.encoded(self.value(text, item), namespace, text)

    def listed(self, text: str, namespace: str) -> tuple[Context, int]:
        """The list of a map as a context, and its length.

        An output that the expression only names is not stored again, and an input is not decoded
        again: either may have 100,000 items.

        Raises:
            InvalidExpression: it cannot be evaluated, or is no list.
            ContentsMissing: an object must be fetched first.
        """
        passed = self._passed(text)
        values = self.value(text) if passed is None else self.resolved(passed)
        if not isinstance(values, list):
            raise InvalidExpression("the items of a map are a list", expression=text)
        if passed is not None and (passed.ref is None or passed.ref.namespace == namespace):
            return passed, len(values)
        if passed is not None or self._input(text) is not _NOTHING:
            return self.refer(Context(ContentType.JSON, value=values), namespace), len(values)
        return self.encoded(values, namespace, text), len(values)

    def encoded(self, value: Any, namespace: str, text: str) -> Context:
        """A value as a context; the expression is named in errors.

        Raises:
            InvalidExpression: the value is nested too deep.
        """
        if value == {}:
            return NO_INPUTS
        try:
            return self.refer(Context.encode(value), namespace)
        except InvalidRecord as error:
            raise InvalidExpression(error.reason, expression=text) from error

    def refer(self, context: Context, namespace: str) -> Context:
        """A reference to a large context; others are unchanged."""
        found: dict[str, tuple[Context, str]] = {}
        referred = self._contents.refer(context, namespace, found)
        if found:
            self._unstored.setdefault(self._flow.root_id, {}).update(found)
        return referred

    def resolved(self, context: Context | None) -> Any:
        """The JSON value of a context; None without one.

        Raises:
            ContentsMissing: an object must be fetched first.
        """
        if context is None:
            return None
        if context not in self._values:
            found = self._contents.resolve(context, self._flow.root_id)
            value = found.decode()
            if found.content_type is ContentType.BYTES:
                value = base64.b64encode(value).decode()
            self._values[context] = value
        return self._values[context]

    def key(self, text: str | None, item: Item | None = None) -> str | None:
        """The value of an expression that must be text; None without an expression.

        Raises:
            InvalidExpression: it is no text, or too long.
        """
        if text is None:
            return None
        value = self.value(text, item)
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_KEY_LENGTH or "\0" in value:
            raise InvalidExpression(
                f"a key is text of 1 to {_MAX_KEY_LENGTH} characters: use string()", expression=text
            )
        return value

    def moment(self, text: str) -> datetime:
        """The value of an expression that must be a moment.

        Raises:
            InvalidExpression: it is none.
        """
        value = self.value(text)
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidExpression(
                f"{_shown(value)} is no moment: write RFC 3339 text or timestamp()", expression=text
            ) from error

    def _input(self, text: str) -> Any:
        """An input that an expression only names, so that a list of 100,000 is not converted."""
        variable, *names = text.strip().split(".")
        if variable != "inputs" or not names:
            return _NOTHING
        value = self.resolved(self._flow.inputs)
        for name in names:
            if not isinstance(value, dict) or name not in value:
                return _NOTHING
            value = value[name]
        return value

    def _passed(self, text: str) -> Context | None:
        """The context that an expression passes on as it is; None for any other expression."""
        parts = text.strip().split(".")
        if parts == ["inputs"]:
            return self._flow.inputs
        if len(parts) == 3 and parts[0] == "nodes" and parts[2] == "output":
            row = self._nodes.get((self._flow.id, parts[1]))
            return row.output if row is not None else None
        return None

    def _variables(self, expression: Expression, item: Item | None) -> dict[str, Any]:
        nodes: dict[str, dict[str, Any]] = {}
        variables: dict[str, Any] = {"inputs": {}, "nodes": nodes, "flow": {}}
        if item is not None:
            variables |= {"item": item.value, "index": item.index}
        for path in expression.paths:
            match path.names:
                case ("inputs", *_):
                    variables["inputs"] = self.resolved(self._flow.inputs)
                case ("flow", *_):
                    variables["flow"] = self._flow_fields()
                case ("nodes", name, *fields):
                    found = nodes.setdefault(name, {})
                    self._add_node(found, name, fields[:1], is_size=path.names in expression.sizes)
        return variables

    def _flow_fields(self) -> dict[str, Any]:
        flow = self._flow
        return {
            "id": flow.id,
            "name": flow.name,
            "version": flow.version,
            "generation": flow.state.generation,
            "schedule": flow.schedule,
            "tick": flow.tick.astimezone(UTC).isoformat().replace("+00:00", "Z") if flow.tick else None,
        }

    def _add_node(self, found: dict[str, Any], name: str, fields: list[str], *, is_size: bool) -> None:
        row = self._nodes.get((self._flow.id, name), NodeRow())
        found["status"] = row.state.status.value
        if row.state.case is not None:
            found["case"] = row.state.case
        if row.state.status is not NodeStatus.SUCCEEDED or fields not in ([], ["output"]):
            return
        if is_size and row.state.items is not None and fields:
            # The size of a list of results, which may be too large to be read, is that of the map.
            found["output"] = [None] * row.state.items.total
        else:
            found["output"] = self.resolved(row.output)


def _shown(value: Any) -> str:
    """A value as JSON, in which definitions and inputs are written."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"


def reads_item(text: str) -> bool:
    """Whether the value of an expression of a map differs from item to item.

    Raises:
        InvalidExpression: it cannot be compiled.
    """
    return any(path.names[0] in ITEM_VARIABLES - FLOW_VARIABLES for path in _compile(text, _ANY_ITEM).paths)


def _compile(text: str, item: Item | None) -> Expression:
    return compile_expression(text, FLOW_VARIABLES if item is None else ITEM_VARIABLES)
