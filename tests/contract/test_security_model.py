"""docs/deploy/security-model.md: each sentence names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy" / "security-model.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for table in re.findall(r"^\| sentence \| test \|\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in table.splitlines()
]


def names_in(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def test_the_page_has_sentences() -> None:
    """The rows are found, so that the next test tests something."""
    assert len(ROWS) > 25
    assert all(len(row) == 2 for row in ROWS)


@pytest.mark.parametrize(("sentence", "named"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_each_sentence_has_a_test(sentence: str, named: str) -> None:
    """O5: a sentence about what someone can or cannot do ends with the tests that show it."""
    assert sentence.endswith(".")
    found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
    assert found, f"no test is named: {sentence}"
    assert named == " ".join(f"`{file}::{name}`" for file, name in found)
    for file, name in found:
        assert name in names_in(ROOT / file), f"{file} has no {name}"
