"""Upper bounds of the size of an expression's value and of its work, before it is evaluated.

A size counts values and characters. The work of `map` and `filter` is quadratic in the library,
because each element copies the list so far; one unit is one such copy, about 20 ns.

The sizes of the elements of a list sum up to the size of the list. So a body that runs for each
element is measured twice: for elements of size 1, once per element, and for one element as large
as the list. Sizes grow at least linearly with their parts, so the sum of both is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cel.syntax import (
    Call,
    Comprehension,
    Constant,
    Literal,
    Name,
    Node,
    path_of,
)

# The library ends an evaluation after so many steps of all comprehensions together.
MAX_STEPS = 10_000
# Values and characters of a value, also of an intermediate one: tens of megabytes.
MAX_SIZE = 2_000_000
# Units of work: about 0.4 s.
MAX_WORK = 20_000_000
# Comprehensions in each other. A body is measured twice, so the estimate doubles with each.
MAX_LOOPS = 4


@dataclass(frozen=True, slots=True)
class Bound:
    """Upper bounds of a value.

    Attributes:
        size: its values and characters.
        count: its values alone.
        length: its elements, when it is a list or map.
    """

    size: int
    count: int
    length: int

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.size + other.size, self.count + other.count, self.length + other.length)


_SCALAR = Bound(1, 1, 1)
# A number as text, a moment, a duration.
_SMALL = Bound(64, 1, 1)
_PREDICATES = {"_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "@in", "_in_", "_&&_", "_||_", "!_", "size"}
_PREDICATES |= {"startsWith", "endsWith", "contains", "@not_strictly_false", "not_strictly_false"}


def measure(value: Any) -> Bound:
    """The size of JSON data."""
    size = count = 0
    waiting = [value]
    while waiting:
        found = waiting.pop()
        count += 1
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, Mapping):
            # A key is a value too, with its characters.
            count += len(found)
            size += sum(map(len, found))
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
    length = len(value) if isinstance(value, Mapping | list | tuple) else 1
    return Bound(size + count, count, length)


class Estimate:
    """One estimate: adds up work, and remembers the largest value.

    Attributes:
        work: units of work so far.
        largest: the size of the largest value so far.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.work = 0
        self.largest = 0
        self._data = data
        self._measured: dict[tuple[str, ...], Bound] = {}

    def of(self, node: Node, names: Mapping[str, Bound]) -> Bound:
        """The bound of a node's value; `names` are the variables of comprehensions around it."""
        found = self._of(node, names)
        self.work += 1
        self.largest = max(self.largest, found.size)
        return found

    def _of(  # noqa: PLR0911 (one return per kind of node)
        self, node: Node, names: Mapping[str, Bound]
    ) -> Bound:
        path = path_of(node)
        if path is not None and path.names[0] not in names:
            return self._read(path.names)
        match node:
            case Constant(size=size):
                return Bound(size, 1, 1)
            case Name(name=name):
                return names.get(name, _SCALAR)
            case Literal(parts=parts):
                found = Bound(1, 1, 0)
                for part in parts:
                    found += self.of(part, names)
                self.work += len(parts)
                return Bound(found.size, found.count, len(parts))
            case Call():
                return self._call(node, names)
            case Comprehension():
                return self._loop(node, names)
        operand = self.of(node.operand, names)
        return _SCALAR if node.is_test else _part(operand)

    def _read(self, names: tuple[str, ...]) -> Bound:
        if names not in self._measured:
            value: Any = self._data
            for name in names:
                # A path that leads nowhere is an error of the evaluation, and has no size.
                value = value.get(name) if isinstance(value, Mapping) else None
            self._measured[names] = measure(value)
        return self._measured[names]

    def _call(self, node: Call, names: Mapping[str, Bound]) -> Bound:
        arguments = [self.of(argument, names) for argument in node.arguments]
        total = sum(argument.size for argument in arguments)
        match node.function:
            case "_+_":
                self.work += total
                return arguments[0] + arguments[-1]
            case "_?_:_":
                yes, no = arguments[1], arguments[2]
                return Bound(max(yes.size, no.size), max(yes.count, no.count), max(yes.length, no.length))
            case "_[_]":
                return _part(arguments[0])
            case "matches":
                self.work += arguments[0].size * arguments[-1].size
                return _SCALAR
            case "string" | "bytes" | "dyn":
                self.work += total
                return arguments[0] + _SMALL
            case function:
                self.work += total
                return _SCALAR if function in _PREDICATES else _SMALL

    def _loop(self, node: Comprehension, names: Mapping[str, Bound]) -> Bound:
        source = self.of(node.source, names)
        steps = min(source.length, MAX_STEPS)
        initial = self.of(node.initial, names)
        small = self._body(node, {**names, **dict.fromkeys(node.names, _SCALAR)}, steps)
        whole = _part(source)
        large = self._body(node, {**names, **dict.fromkeys(node.names, whole)}, 1)
        if not isinstance(node.initial, Literal):
            return _SCALAR
        self.work += steps * steps
        size = initial.size + steps * small.size + large.size
        return Bound(size, initial.count + steps * small.count + large.count, steps)

    def _body(self, node: Comprehension, names: dict[str, Bound], times: int) -> Bound:
        before, self.work = self.work, 0
        names[node.accumulator] = Bound(0, 0, 0)
        self.of(node.condition, names)
        found = self.of(node.step, names)
        self.work = before + self.work * times
        self.largest = max(self.largest, found.size)
        return found


def loops(node: Node) -> int:
    """How many comprehensions are in each other."""
    match node:
        case Comprehension():
            inside = max(loops(part) for part in (node.condition, node.step, node.result))
            return max(1 + inside, loops(node.source))
        case Call(arguments=parts) | Literal(parts=parts):
            return max(map(loops, parts), default=0)
        case Constant() | Name():
            return 0
    return loops(node.operand)


def _part(whole: Bound) -> Bound:
    # A part is at most as large as the whole; its length is unknown.
    return Bound(whole.size, whole.count, whole.count)
