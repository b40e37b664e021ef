"""The syntax tree of an expression, and the data that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cel.wire import Message


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal; strings have their text, all other literals None."""

    at: int
    text: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Name:
    """A variable."""

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """`operand.field`; `is_test` for `has(operand.field)`."""

    at: int
    operand: Node
    field: str
    is_test: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function or operator, by its name in the specification (`_+_`, `_[_]`, `size`)."""

    at: int
    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """A list or a map literal, with its elements, keys and values."""

    at: int
    parts: tuple[Node, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class Comprehension:
    """`all`, `exists`, `exists_one`, `map` or `filter`."""

    at: int
    names: tuple[str, ...]
    source: Node
    accumulator: str
    initial: Node
    condition: Node
    step: Node
    result: Node


Node = Constant | Name | Select | Call | Literal | Comprehension


@dataclass(frozen=True, slots=True)
class Path:
    """Data that an expression reads: a variable, and fields as far as the text names them.

    Attributes:
        names: the variable and the fields.
        at: where the path begins, as an offset in characters.
    """

    names: tuple[str, ...]
    at: int


def parse_tree(serialized: bytes) -> Node:
    """The tree of a checked expression, in the envelope `google.protobuf.Any`.

    Raises:
        ValueError: the tree has a form that this module does not know. Its bounds would be wrong.
    """
    checked = Message.parse(serialized).message(2)
    source = checked.message(5)
    positions = {entry.integer(1): entry.integer(2) for entry in source.messages(4)}
    return _node(checked.message(4), positions)


def _node(found: Message, positions: dict[int, int]) -> Node:  # noqa: PLR0911 (one return per kind)
    at = positions.get(found.integer(2), 0)

    def child(parent: Message, number: int) -> Node:
        return _node(parent.message(number), positions)

    if found.has(4):
        return Name(at, found.message(4).text(1))
    if found.has(5):
        select = found.message(5)
        return Select(at, child(select, 1), select.text(2), bool(select.integer(3)))
    if found.has(6):
        call = found.message(6)
        target = [child(call, 1)] if call.has(1) else []
        arguments = [_node(argument, positions) for argument in call.messages(3)]
        return Call(at, call.text(2), (*target, *arguments))
    if found.has(7):
        parts = [_node(element, positions) for element in found.message(7).messages(1)]
        return Literal(at, tuple(parts), is_list=True)
    if found.has(8):
        entries = found.message(8).messages(2)
        parts = [child(entry, number) for entry in entries for number in (3, 4) if entry.has(number)]
        return Literal(at, tuple(parts), is_list=False)
    if found.has(9):
        loop = found.message(9)
        names = tuple(loop.text(number) for number in (1, 8) if loop.has(number))
        return Comprehension(
            at,
            names,
            source=child(loop, 2),
            accumulator=loop.text(3),
            initial=child(loop, 4),
            condition=child(loop, 5),
            step=child(loop, 6),
            result=child(loop, 7),
        )
    if not found.has(3):
        raise ValueError(f"unknown node with the fields {sorted(found.fields)}")
    constant = found.message(3)
    size = len(constant.data(6)) + len(constant.data(7))
    return Constant(at, constant.text(6) if constant.has(6) else None, 1 + size)


def children(node: Node) -> tuple[Node, ...]:
    """The direct parts of a node."""
    match node:
        case Select(operand=operand):
            return (operand,)
        case Call(arguments=parts) | Literal(parts=parts):
            return parts
        case Comprehension():
            return (node.source, node.initial, node.condition, node.step, node.result)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """A node and everything in it."""
    yield node
    for part in children(node):
        yield from walk(part)


def path_of(node: Node) -> Path | None:
    """The path that a node is: `a.b`, `a["b"]` or `a`; None for everything else."""
    names: list[str] = []
    while True:
        match node:
            case Name(at, name):
                return Path((name, *reversed(names)), at)
            case Select(operand=operand, field=field):
                names.append(field)
                node = operand
            case Call(function="_[_]", arguments=(operand, Constant(text=str(text)))):
                names.append(text)
                node = operand
            case _:
                return None


def paths(node: Node, bound: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The longest paths of free variables, each where it stands."""
    found = path_of(node)
    if found is not None:
        if found.names[0] not in bound:
            yield found
        return
    if isinstance(node, Comprehension):
        yield from paths(node.source, bound)
        yield from paths(node.initial, bound)
        inside = bound | {*node.names, node.accumulator}
        for part in (node.condition, node.step, node.result):
            yield from paths(part, inside)
        return
    for part in children(node):
        yield from paths(part, bound)


def sizes(node: Node) -> Iterator[tuple[str, ...]]:
    """The paths of which an expression reads nothing but the size."""
    read = Counter(path.names for path in paths(node))
    sized = Counter(
        path.names
        for call in walk(node)
        if isinstance(call, Call) and call.function == "size" and len(call.arguments) == 1
        if (path := path_of(call.arguments[0])) is not None
    )
    for names, count in sized.items():
        related = (other for other in read if other[: len(names)] == names[: len(other)])
        if list(related) == [names] and read[names] == count:
            yield names
