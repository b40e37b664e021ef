"""Statements name their parameters, and each call names those that its statement has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.query_rights import all_queries

from penstock.postgres import queries

REPOSITORY = Path(__file__).parents[2]
# Calls of a query by this name are not checked by `calls`.
PARK = "outbox.park"
CALLS = frozenset({"bound", "fetch", "fetchrow", "fetchval", "execute", "repeat"})


@pytest.mark.parametrize("name", sorted(all_queries()))
def test_a_statement_with_more_than_three_parameters_names_them(name: str) -> None:
    """A number says nothing about its value, so two values of one type are easily exchanged."""
    text, parameters = queries.statement(name)
    code = re.sub(r"--.*|'[^']*'", "", text)
    numbers = {int(number) for number in re.findall(r"\$(\d+)", code)}
    assert parameters or max(numbers, default=0) <= 3
    assert numbers == set(range(1, len(numbers) + 1))


def test_a_statement_that_mixes_names_and_numbers_is_refused() -> None:
    """The numbers of its names would collide with its own."""
    with pytest.raises(ValueError, match="has numbered and named parameters"):
        queries._compiled("a.b", "SELECT $1, $name")


def test_a_name_has_one_number_and_none_in_comments_and_strings() -> None:
    """Names get numbers in the order in which the statement first has them."""
    text, parameters = queries._compiled("a.b", "-- It's $c.\nSELECT $b, '$c', $a_a, $b::text[]")
    assert text == "-- It's $c.\nSELECT $1, '$c', $2, $1::text[]"
    assert parameters == ("b", "a_a")


@pytest.mark.parametrize(
    ("positional", "named", "error"),
    [
        ((), {"id": 1, "keys": [], "records": []}, "missing: refused; unknown: none"),
        ((), {"id": 1, "keys": [], "records": [], "reason": ""}, "missing: refused; unknown: reason"),
        ((), {"id": 1, "keys": [], "records": [], "refused": "", "x": 1}, "missing: none; unknown: x"),
        ((1,), {"id": 1, "keys": [], "records": [], "refused": ""}, "got 1 arguments without a name"),
    ],
)
def test_wrong_names_are_refused(positional: tuple[int, ...], named: dict[str, object], error: str) -> None:
    """The error has the names, because the driver would know only a number."""
    with pytest.raises(TypeError, match=error):
        queries.bound(PARK, *positional, **named)


def test_arguments_have_the_order_of_the_statement() -> None:
    """The order of a call does not matter, and the text is the same object for each call."""
    text, *values = queries.bound(PARK, refused="r", records=[b"v"], keys=[b"k"], id=1)
    assert dict(zip(queries.statement(PARK).parameters, values, strict=True)) == {
        "id": 1,
        "keys": [b"k"],
        "records": [b"v"],
        "refused": "r",
    }
    assert text is queries.query(PARK)


def calls() -> Iterator[tuple[str, str, ast.Call, int]]:
    """Place, query, call and number of arguments before those of the query."""
    for folder in ("services", "tests", "benchmarks"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            # Parsing the others takes most of the time.
            if all_queries().keys().isdisjoint(re.findall(r"\w+\.\w+", text)):
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Call):
                    continue
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if called not in CALLS:
                    continue
                for position, argument in enumerate(node.args[:2]):
                    if isinstance(argument, ast.Constant) and argument.value in all_queries():
                        place = f"{file.relative_to(REPOSITORY)}:{node.lineno}"
                        yield place, argument.value, node, position + 1


def test_each_call_has_the_parameters_of_its_statement() -> None:
    """A call of which all arguments are written out names each parameter and no other; the rest
    of a call with `**` is checked when it runs."""
    checked = 0
    wrong = []
    for place, name, call, before in calls():
        parameters = set(queries.statement(name).parameters)
        given = {keyword.arg for keyword in call.keywords}
        is_complete = None not in given
        given.discard(None)
        unnamed = call.args[before:]
        if given - parameters or (parameters and unnamed) or (is_complete and parameters - given):
            wrong.append(f"{place}: {name}")
        checked += bool(parameters)
    assert wrong == []
    assert checked > 60
