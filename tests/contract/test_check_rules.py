"""The rules of `penstock check`: the code, the registered list and the page name the same ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from penstock.checks.app import RULES
from penstock.checks.report import Rule
from penstock.checks.rule import Check, RowCheck

PAGE = Path(__file__).parents[2] / "docs/how-to/check-and-repair.md"


def subclasses(kind: type[Check]) -> set[type[Check]]:
    below = {found for each in kind.__subclasses__() for found in (each, *subclasses(each))}
    return {each for each in below if not inspect.isabstract(each) and each is not RowCheck}


def test_every_rule_is_registered_once() -> None:
    """O2b: the check forgets no rule, and each rule has a class with a repair or a reason."""
    assert len(set(RULES)) == len(RULES)
    assert set(RULES) == subclasses(Check)
    # `Queued` finds two rules: one of them says what it cannot decide.
    assert {rule.rule for rule in RULES} | {Rule.UNPROVEN} == set(Rule)
    assert all(rule.__doc__ for rule in RULES)


def test_the_page_explains_every_rule() -> None:
    """O2b: an operator finds each rule of a report on the page, with its repair."""
    table = PAGE.read_text().partition("| rule |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(Rule)
