"""JSON text in which a name stands twice."""

from __future__ import annotations

import pytest

from penstock.contracts.parsing import Unreadable, parse, parse_batch
from penstock.errors import InvalidRecord


@pytest.mark.parametrize(
    ("text", "at", "name"),
    [
        ('{"a": 1, "a": 1}', "/a", "a"),
        ('{"b": {"x/y": [], "x/y": {}}}', "/b/x~1y", "x/y"),
        (r'[{"a": 1}, {"a": 1, "\u0061": 2}]', "/1/a", "a"),
        ('{"a": [{"q": {}}, {"q": 1, "q": 2}], "a": 1}', "/a/1/q", "q"),
    ],
)
def test_the_first_name_that_stands_twice_is_refused_with_its_place(text, at, name):
    """O8: the last value replaced the first one without a word."""
    with pytest.raises(InvalidRecord) as refused:
        parse(text.encode(), unique=True)
    assert refused.value.pointer == at
    assert refused.value.reason == f"{name!r} stands twice: remove one, or rename it"
    parse(text.encode())


def test_equal_names_in_different_objects_are_accepted():
    """O8: the check compares names of one object only."""
    text = b'[{"a": {"a": [{"a": 1}, {"a": 1}]}}, {"a": 1}]'
    assert parse(text, unique=True) == parse(text)


def test_an_entry_with_a_repeated_name_is_refused_alone():
    """T5: with its place in the entry."""
    good, bad = parse_batch(b'[{"a": 1}, {"b": {"a": 1, "a": 2}}]', "", unique=True)
    assert good == {"a": 1}
    assert isinstance(bad, Unreadable)
    assert bad.fault.pointer == "/b/a"
