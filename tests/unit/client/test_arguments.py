"""Arguments of the client of the wrong type: the error names the argument."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.client import Draft, FlowDraft, FlowFilter, TaskFilter
from penstock.core.task import Priority
from penstock.errors import InvalidRecord


@pytest.mark.parametrize(
    ("build", "arguments", "pointer"),
    [
        (Draft, {"callbacks": "https://a.example/"}, "/callbacks"),
        (Draft, {"callbacks": {"url": "https://a.example/"}}, "/callbacks"),
        (Draft, {"run_at": "tomorrow"}, "/run_at"),
        (Draft, {"run_at": 1_790_000_000}, "/run_at"),
        (Draft, {"priority": "high"}, "/priority"),
        (Draft, {"priority": 3}, "/priority"),
        (Draft, {"labels": ["red"]}, "/labels"),
        (FlowDraft, {"callbacks": "https://a.example/"}, "/callbacks"),
        (FlowDraft, {"inputs": ["a"]}, "/inputs"),
        (FlowDraft, {"priority": "urgent"}, "/priority"),
        (FlowDraft, {"labels": "red"}, "/labels"),
        (TaskFilter, {"ids": 5}, "/ids"),
        (TaskFilter, {"ids": ["5"]}, "/ids/0"),
        (TaskFilter, {"states": "failed"}, "/states"),
        (TaskFilter, {"priorities": ["low"]}, "/priorities"),
        (TaskFilter, {"finished_since": "2026-11-01"}, "/finished_since"),
        (FlowFilter, {"statuses": "failed"}, "/statuses"),
        (FlowFilter, {"created_until": 5}, "/created_until"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_argument(
    build: Any, arguments: dict[str, Any], pointer: str
) -> None:
    """O8: a text instead of a list would be taken apart, and a text instead of a moment would fail
    without its name."""
    name = {Draft: "type", FlowDraft: "flow"}.get(build)
    value = build(**({name: "media"} if name else {}), **arguments)
    with pytest.raises(InvalidRecord) as caught:
        value.to_wire()
    assert caught.value.pointer == pointer
    assert str(caught.value).startswith(pointer)
    assert "expected" in str(caught.value)


def test_right_values_are_sent_as_they_are() -> None:
    """The checks accept any iterable, and names of priorities."""
    draft = Draft(type="media", callbacks=("https://a.example/",), priority="HIGH", labels={"a": "b"})
    wire = draft.to_wire()
    assert wire["callbacks"] == ["https://a.example/"]
    assert wire["priority"] == Priority.HIGH.name
    generated = cast(Any, (number for number in (5, 7)))
    assert TaskFilter(ids=generated).to_wire() == {"ids": [5, 7]}
