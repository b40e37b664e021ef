"""Classes stay under 200 lines; those that are longer may only become shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

LIMIT = 200
LONGER: dict[str, int] = {}


def longer_classes() -> Iterator[tuple[str, int]]:
    """The classes of more than `LIMIT` lines, docstrings and comments included."""
    root = Path(penstock.__file__).parent
    for file in sorted(root.rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > LIMIT:
                    yield f"{module}.{node.name}", lines


def test_classes_stay_short() -> None:
    """A class above the limit is in the list, which has the lines that it must not exceed."""
    found = dict(longer_classes())
    assert {name: lines for name, lines in found.items() if lines > LONGER.get(name, LIMIT)} == {}


def test_the_list_has_no_class_that_became_short() -> None:
    """A class that is under the limit now must not grow again."""
    assert set(LONGER) <= set(dict(longer_classes()))
