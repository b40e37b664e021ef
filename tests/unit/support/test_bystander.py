"""The delay of the bystander of the mixed faults: which waits count."""

from __future__ import annotations

import math

import pytest
from tests.chaos.bystander import Span, delay_s

AWAY = Span("away", begin_s=10, over_s=15, excused_s=20)
OTHER = Span("other", begin_s=12, over_s=30, excused_s=12)
LASTING = Span("lasting", begin_s=18, over_s=math.inf, excused_s=math.inf)


@pytest.mark.parametrize(
    ("begin_s", "end_s", "spans", "expected_s"),
    [
        (0, 5, [AWAY], 5),
        (5, 12, [AWAY], 5),
        (5, 22, [AWAY], 7),
        (12, 18, [AWAY], 0),
        (18, 29, [AWAY], 9),
        (11, 29, [OTHER], 18),
        (11, 29, [OTHER, AWAY], 9),
        (5, 40, [LASTING, AWAY, OTHER], 5),
        (5, 40, [], 35),
    ],
)
def test_only_excused_time_does_not_count(begin_s, end_s, spans, expected_s):
    """S12: the time that a fault excuses counts once, however faults overlap; all other time is
    delay."""
    assert delay_s(begin_s, end_s, spans) == expected_s
