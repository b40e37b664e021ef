"""Reads definitions as YAML or JSON, with the place of each value.

YAML has the types of JSON only: `on`, `1:30` or `2026-11-23` are strings. A name that stands twice
is a fault, and so is an alias, since a few of them can expand to gigabytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from penstock.flows.faults import Fault, pointer

# The largest definition. A thousand nodes need a tenth of it.
MAX_BYTES = 4 * 1024 * 1024
# The deepest nesting of a definition; its schema needs seven levels, and defaults the rest.
MAX_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file as data.

    Attributes:
        document: the data; None if the file cannot be read.
        faults: what is wrong with the text.
        places: line and column of each value, by JSON Pointer.
    """

    document: Any
    faults: list[Fault]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def place(self, fault: Fault) -> Fault:
        """The fault with the place of its value, or of the nearest value around it."""
        if fault.line:
            return fault
        at = fault.pointer
        while at and at not in self.places:
            at = at.rpartition("/")[0]
        line, column = self.places.get(at, (0, 0))
        return replace(fault, line=line, column=column)


class _Loader(yaml.SafeLoader):
    """A loader with the scalars of JSON."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false)$", "tf"),
    ("null", r"^(?:null|~|)$", ["n", "~", ""]),
    ("int", r"^-?(?:0|[1-9][0-9]*)$", "-0123456789"),
    ("float", r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", "-0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


_COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def load(data: bytes) -> Loaded:  # noqa: PLR0911 (one return per way in which a text is unreadable)
    """Reads one definition; JSON is YAML, but for tabs, which are read as blanks."""
    if len(data) > MAX_BYTES:
        return _unreadable(f"{len(data):,} bytes; {MAX_BYTES:,} is the limit: use sub-flows")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _unreadable(f"byte {error.start} is not UTF-8: save the file as UTF-8")
    if text.lstrip()[:1] == "{":
        # YAML refuses tabs, with which JSON may be indented. Strings of JSON have none.
        text = text.replace("\t", " ")
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = (before.count("\n") + 1, error.position - before.rfind("\n"))
        return _unreadable(
            f"the character U+{ord(text[error.position]):04X} is not allowed: remove it", place
        )
    try:
        root = loader.get_single_node()
        if root is None:
            return _unreadable("the file is empty: write a definition")
        return _Reader(loader).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        return _unreadable(f"not YAML: {', '.join(filter(None, (error.context, error.problem)))}", place)
    except RecursionError:
        return _unreadable(f"nested deeper than {MAX_LEVELS} levels")
    finally:
        loader.dispose()


def _unreadable(reason: str, place: tuple[int, int] = (0, 0)) -> Loaded:
    return Loaded(None, [Fault("text", "", reason, *place)])


class _Reader:
    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._faults: list[Fault] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._seen: set[int] = set()

    def read(self, root: yaml.Node) -> Loaded:
        document = self._value(root, "", 0)
        return Loaded(document, self._faults, self._places)

    def _value(  # noqa: PLR0911 (one return per kind of value)
        self, node: yaml.Node, at: str, levels: int
    ) -> Any:
        place = (node.start_mark.line + 1, node.start_mark.column + 1)
        self._places[at] = place
        if levels > MAX_LEVELS:
            self._fault(at, f"nested deeper than {MAX_LEVELS} levels", place)
            return None
        if id(node) in self._seen:
            self._fault(at, "aliases are not supported: write the value out", place)
            return None
        self._seen.add(id(node))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            self._fault(at, f"the tag {node.tag} is not supported: write a value of JSON", place)
            return None
        if isinstance(node, yaml.MappingNode):
            return {
                name: self._value(value, f"{at}{pointer(name)}", levels + 1)
                for name, value in self._members(node, at)
            }
        if isinstance(node, yaml.SequenceNode):
            return [self._value(value, f"{at}/{index}", levels + 1) for index, value in enumerate(node.value)]
        try:
            return _scalar(node.tag.removeprefix("tag:yaml.org,2002:"), node.value)
        except ValueError as error:
            self._fault(at, str(error), place)
            return None

    def _members(self, node: yaml.MappingNode, at: str) -> Iterator[tuple[str, yaml.Node]]:
        names: dict[str, tuple[int, int]] = {}
        for key, value in node.value:
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            if not isinstance(key, yaml.ScalarNode):
                self._fault(at, "the name of a field is a string", place)
                continue
            try:
                name = _text(key.value)
            except ValueError as error:
                self._fault(at, str(error), place)
                continue
            if name in names:
                line, column = names[name]
                reason = f"{name!r} stands twice, first at {line}:{column}: remove one, or rename it"
                self._faults.append(Fault("duplicate_name", f"{at}{pointer(name)}", reason, *place))
                continue
            names[name] = place
            yield name, value

    def _fault(self, at: str, reason: str, place: tuple[int, int]) -> None:
        self._faults.append(Fault("text", at, reason, *place))


def _scalar(kind: str, text: str) -> str | float | bool | None:
    match kind:
        case "null":
            return None
        case "bool":
            return text == "true"
        case "int":
            # Python refuses to convert thousands of digits.
            if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
                raise ValueError(f"the integer {text[:40]} has more than 64 bits: write it as a string")
            return int(text)
        case "float":
            if not math.isfinite(float(text)):
                raise ValueError(f"the number {text[:40]} is too large: write it as a string")
            return float(text)
        case "str":
            return _text(text)
    raise ValueError(f"the tag {kind} is not supported: write a value of JSON")


def _text(text: str) -> str:
    try:
        # JSON escapes a character beyond U+FFFF as two halves, which YAML does not join.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("the text has half a character (a lone surrogate): remove it") from error
    if "\0" in text:
        raise ValueError("the text has a NUL character, which PostgreSQL cannot store: remove it")
    return text
