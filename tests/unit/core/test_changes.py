"""What the audit keeps of a change."""

import pytest

from penstock.core.changes import difference


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (None, {"a": 1}, {"before": None, "after": {"a": 1}}),
        ({"a": 1}, None, {"before": {"a": 1}, "after": None}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"before": {"b": 2}, "after": {"b": 3}}),
        ({"a": 1}, {"a": 1}, {"before": {}, "after": {}}),
        ({"a": None}, {}, {"before": {"a": None}, "after": {}}),
        ({}, {"a": None}, {"before": {}, "after": {"a": None}}),
    ],
)
def test_a_difference_has_the_fields_that_differ(before, after, kept):
    """O5: the audit keeps a new or removed document as a whole, and of a change the fields that
    differ."""
    assert difference(before, after) == kept
