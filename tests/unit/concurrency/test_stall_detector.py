"""When work counts as stalled."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from penstock.concurrency.stall_detector import StallDetector
from penstock.errors import Stalled


def test_an_unchanged_mark_is_a_stall_after_the_limit() -> None:
    """O2a: not at the limit, but beyond it; the error names only what stands still."""
    marks: dict[str, Hashable] = {"a": 1, "b": 1}
    detector = StallDetector(10, lambda: marks, name="stages")
    detector.check(0)
    marks["b"] = 2
    detector.check(10)
    with pytest.raises(Stalled, match=r"^stages: a: no progress for 10 s$"):
        detector.check(11)


def test_work_that_was_at_rest_starts_anew() -> None:
    """O2a: an idle hour is no stall."""
    marks: dict[str, Hashable] = {"a": 1}
    detector = StallDetector(10, lambda: marks)
    detector.check(0)
    marks.clear()
    detector.check(9)
    marks["a"] = 1
    detector.check(3_600)
    detector.check(3_610)
