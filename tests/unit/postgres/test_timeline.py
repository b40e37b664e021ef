"""The timeline of a task, from its row and its attempts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.postgres.timeline import SAME_INPUT, steps_of, timeline

ROW = {"state": "succeeded", "step": 2, "stage": "c", "attempt": 0, "content_type": "json"}
ROW |= {"context": b"3", "context_ref": None}


def attempt(step: int, number: int = 0, outcome: str = "next", **columns: Any) -> dict[str, Any]:
    return {"step": step, "attempt": number, "stage": "abc"[step], "outcome": outcome, **columns}


def kept(data: bytes | str | None, input_type: str = "json") -> dict[str, Any]:
    return {"input_type": input_type, "input": data, "input_ref": None}


def test_each_step_has_its_input() -> None:
    """F3: the attempt that left a stage has its input; the task has that of its last stage."""
    attempts = [attempt(0, outcome="fail"), attempt(0, 1, **kept(b"1")), attempt(1, **kept(b"2"))]
    steps = steps_of({**ROW, "attempts": [*attempts, attempt(2, outcome="done")]})
    assert [(step.number, step.stage, len(step.attempts)) for step in steps] == [
        (0, "a", 2),
        (1, "b", 1),
        (2, "c", 1),
    ]
    assert [step.input.data for step in steps if step.input] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [(kept(None, SAME_INPUT), b"3"), (kept("\\x3132"), b"12"), ({}, None)],
    ids=["handed on", "in history", "not kept"],
)
def test_an_input_that_is_not_in_the_row_as_bytes(last: dict[str, Any], expected: bytes | None) -> None:
    """F3, O9: a stage that hands its input on stores nothing, and one of a service of the version
    before is known to have no input. In history bytes are hexadecimal digits."""
    attempts = [attempt(0, **kept(None, SAME_INPUT)), attempt(1, **last)]
    first, second, _third = steps_of({**ROW, "attempts": attempts})
    for step in (first, second):
        assert (step.input and step.input.data) == expected


@pytest.mark.parametrize("state", ["queued", "running"])
def test_the_current_attempt_is_shown_until_it_has_ended(state: str) -> None:
    """F3: the attempts are read after the task, so some may be newer than its row."""
    row = {**ROW, "state": state, "step": 1, "stage": "b", "worker": "w"}
    before = steps_of({**row, "attempts": [attempt(0, **kept(b"1"))]})
    assert [each["outcome"] for each in before[1].attempts] == [None]
    ended = steps_of({**row, "attempts": [attempt(0, **kept(b"1")), attempt(1, **kept(b"2")), attempt(2)]})
    assert [step.number for step in ended] == [0, 1]
    assert [each["outcome"] for each in ended[1].attempts] == ["next"]


def test_an_answer_has_the_first_inputs_only() -> None:
    """F3: a task may enter thousands of stages, and its document stays small."""
    attempts = [attempt(0, **kept(b'"aaaa"')), attempt(1, **kept(b'"bbbb"'))]
    row = {**ROW, "attempts": attempts}
    assert ["input" in step for step in timeline(row, 7)] == [True, False, False]
    assert [step["input_size"] for step in timeline(row, 7)] == [6, 6, 1]
    assert ["input" in step for step in timeline(row)] == [True, True, True]
