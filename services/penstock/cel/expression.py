"""Compiles and evaluates expressions, and translates the library's errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from cel_expr_python import cel

from penstock.cel.bounds import MAX_LOOPS, MAX_SIZE, MAX_STEPS, MAX_WORK, Estimate, loops
from penstock.cel.syntax import (
    Call,
    Comprehension,
    Literal,
    Node,
    Path,
    Select,
    parse_tree,
    paths,
    sizes,
    walk,
)
from penstock.errors import InvalidExpression

# Room for the largest map of inputs. What needs more is a task.
MAX_CHARACTERS = 4_096
# The library's own limit, which cannot be changed.
_MAX_LEVELS = 32
# Values of a result: a result is converted one by one.
_MAX_RESULT_LEVELS = 200

_PLACE = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): ?(.*)")
_TOO_DEEP = re.compile(r"recursion (?:limit|depth)", re.IGNORECASE)
_MISSING_KEY = re.compile(r'Key not found in map : "(.*)"', re.DOTALL)
_NO_OVERLOAD = re.compile(r"No matching overloads? found ?:? ?([^ (]+)")
_OPERATOR = re.compile(r"^_?(\W+|in)_$")


class Expression:
    """A compiled expression.

    Attributes:
        text: its source.
        paths: the data that it reads, as far as its text names it.
        sizes: those of the paths of which it reads nothing but the size.
        type: the type of its value as far as it is certain: `BOOL`, `INT`, `UINT`, `DOUBLE`,
            `STRING`, `LIST`, `MAP`, `NULL`, `TIMESTAMP` or another of CEL; `DYN` if it is not.
    """

    def __init__(self, text: str, compiled: cel.Expression, tree: Node) -> None:
        self.text = text
        self.paths: tuple[Path, ...] = tuple(paths(tree))
        self.type: str = compiled.return_type().name().partition("<")[0]
        self.sizes: frozenset[tuple[str, ...]] = frozenset(sizes(tree))
        self._compiled = compiled
        self._tree = tree
        self._read = _tree_of(path.names for path in self.paths)
        # Only these make a value that is larger than the data.
        self._grows = any(isinstance(node, Call | Comprehension | Literal) for node in walk(tree))

    def evaluate(self, data: Mapping[str, Any]) -> Any:
        """The value for some data, as JSON.

        Integers have 64 bits, as those of contexts. A moment is RFC 3339 text in UTC.

        Args:
            data: the variables, as JSON.

        Raises:
            InvalidExpression: it cannot be evaluated, might become too large or takes too long, or
                its value is not JSON. The error has the expression and, if it is certain, the
                place.
        """
        # The library converts all that it gets, and a map evaluates one expression for each item.
        data = _only(data, self._read)
        if self._grows:
            self._check_bounds(data)
        try:
            value = self._compiled.eval(data=data)
            kind, plain = value.type().name(), value.plain_value()
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise self._failed(str(error)) from error
        if kind == "ERROR":
            raise self._failed(plain)
        return self._as_json(plain)

    @property
    def keys(self) -> frozenset[str] | None:
        """The names of an object, if the whole expression writes one out; else None."""
        if not isinstance(self._tree, Literal) or self._tree.is_list:
            return None
        found = [getattr(part, "text", None) for part in self._tree.parts[::2]]
        return None if None in found else frozenset(map(str, found))

    def position(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of an offset in characters."""
        before = self.text[:at]
        return before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1

    def _check_bounds(self, data: Mapping[str, Any]) -> None:
        estimate = Estimate(data)
        estimate.of(self._tree, {})
        if estimate.largest > MAX_SIZE:
            raise self._error(
                f"a value could have {estimate.largest:,} values and characters; {MAX_SIZE:,} is the limit: "
                "pass the list on, and take the parts where they are used"
            )
        if estimate.work > MAX_WORK:
            raise self._error(
                f"the evaluation could take {estimate.work:,} steps; {MAX_WORK:,} is the limit: "
                "pass the list on, or filter it in a task"
            )

    def _failed(self, message: str) -> InvalidExpression:
        message = message.strip("'")
        if "Iteration budget" in message:
            return self._error(f"its comprehensions have more than {MAX_STEPS:,} steps: use a task")
        missing = _MISSING_KEY.search(message)
        if missing:
            name = missing[1]
            at = self._only(node.at for node in walk(self._tree) if _reads(node, name))
            return self._error(f"there is no field {name!r}: test it with has()", at)
        overload = _NO_OVERLOAD.search(message)
        if overload:
            function = overload[1]
            at = self._only(
                node.at for node in walk(self._tree) if isinstance(node, Call) and node.function == function
            )
            types = message.partition(function)[2]
            operator = _OPERATOR.match(function)
            if "jump" in function:
                return self._error("the condition of ?: is neither true nor false")
            shown = operator[1] if operator else function
            return self._error(
                f"no operation {shown} for {types or 'these types'}: convert with int() or double()", at
            )
        # The library's messages begin with a code of its own.
        return self._error(re.sub(r"^[A-Z_]+: |(?: \[[A-Z_]+\])+$", "", message))

    def _only(self, places: Any) -> int | None:
        found = list(dict.fromkeys(places))
        return found[0] if len(found) == 1 else None

    def _error(self, reason: str, at: int | None = None) -> InvalidExpression:
        line, column = (0, 0) if at is None else self.position(at)
        return InvalidExpression(reason, expression=self.text, line=line, column=column)

    def _as_json(self, value: Any, levels: int = 0) -> Any:
        if levels > _MAX_RESULT_LEVELS:
            raise self._error(f"its value is nested deeper than {_MAX_RESULT_LEVELS} levels")
        match value:
            case None | bool() | int() | str():
                return value
            case float() if math.isfinite(value):
                return value
            case float():
                raise self._error(f"its value has {value}, which JSON does not know")
            case list():
                return [self._as_json(part, levels + 1) for part in value]
            case dict():
                return {self._key(key): self._as_json(part, levels + 1) for key, part in value.items()}
            case datetime():
                return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        kind = {"bytearray": "bytes", "bytes": "bytes", "timedelta": "a duration", "Type": "a type"}
        found = kind.get(type(value).__name__, type(value).__name__)
        raise self._error(f"its value has {found}, which JSON does not know: convert it with string()")

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise self._error(f"its value has the key {key!r}: the keys of JSON are strings")
        return key


def _tree_of(paths: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Paths as nested objects by name; None where a path ends, so that all below it is read."""
    root: dict[str, Any] = {}
    for path in paths:
        below = root
        for name in path[:-1]:
            below = below.setdefault(name, {})
            if below is None:
                break
        else:
            below[path[-1]] = None
    return root


def _only(value: Any, read: Mapping[str, Any] | None) -> Any:
    """The parts of a value that a tree of paths names. A value that is no object stays whole."""
    if read is None or not isinstance(value, Mapping):
        return value
    return {name: _only(value[name], below) for name, below in read.items() if name in value}


@lru_cache(maxsize=4_096)
def compile_expression(text: str, variables: frozenset[str]) -> Expression:
    """Compiles an expression over some variables of any type.

    Raises:
        InvalidExpression: its syntax is wrong, it names something unknown, or it is too large; with
            the place.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidExpression(
            f"{len(text):,} characters; {MAX_CHARACTERS:,} is the limit: use a task",
            expression=text,
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidExpression("it has a lone surrogate", expression=text) from error
    if "\0" in text:
        raise InvalidExpression("it has a NUL character", expression=text)
    try:
        compiled = _environment(variables).compile(text)
        tree = parse_tree(compiled.serialize())
        # The library finds some wrong types only when it is asked for that of the value.
        expression = Expression(text, compiled, tree)
    except RuntimeError as error:
        raise _refused(text, str(error)) from error
    if loops(tree) > MAX_LOOPS:
        raise InvalidExpression(
            f"more than {MAX_LOOPS} comprehensions in each other: use a task", expression=text
        )
    return expression


@lru_cache(maxsize=64)
def _environment(variables: frozenset[str]) -> cel.Env:
    return cel.NewEnv(variables=dict.fromkeys(variables, cel.Type.DYN))


def _refused(text: str, message: str) -> InvalidExpression:
    if _TOO_DEEP.search(message):
        return InvalidExpression(
            f"nested deeper than {_MAX_LEVELS} levels, or a chain of more parts", expression=text
        )
    places = [(int(line), int(column), reason) for line, column, reason in _PLACE.findall(message)]
    if not places:
        reason = re.sub(r"^[A-Z_]+: | \[[A-Z_]+\]$", "", message.partition("\n")[0])
        return InvalidExpression(reason, expression=text)
    line, column, reason = places[0]
    reason = reason.removesuffix(" [INVALID_ARGUMENT]").replace(" (in container '')", "")
    # The list of tokens is long, and most of them do not help.
    reason = reason.partition(" expecting {")[0]
    return InvalidExpression(reason, expression=text, line=max(line, 0), column=max(column, 0))


def _reads(node: Node, name: str) -> bool:
    if isinstance(node, Select):
        return node.field == name and not node.is_test
    return (
        isinstance(node, Call)
        and node.function == "_[_]"
        and getattr(node.arguments[1], "text", None) == name
    )
