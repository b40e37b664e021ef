"""The wait of fetches at the broker."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.kafka.client.fetch_wait import BUSY_S, CALM_S, LINGER_BYTES, RESTS, FetchWait


@dataclass
class State:
    """The part of a partition's state that is used."""

    paused: bool = False
    has_valid_position: bool = True


class Assignment(dict[str, State]):
    """Partitions and their states."""

    @property
    def tps(self):
        return self.keys()

    state_value = dict.get


class Fetcher:
    """The part of aiokafka's fetcher that is used."""

    def __init__(self):
        self._records = {}
        self._fetch_max_wait_ms = 500
        self._fetch_min_bytes = 1
        self.asked = []

    def _get_actions_per_node(self, assignment):
        self.asked.append(assignment)
        return "what to do"

    def terms(self, assignment):
        """Wait in seconds, and minimum bytes, of the fetch that is planned now."""
        assert self._get_actions_per_node(assignment) == "what to do"
        return self._fetch_max_wait_ms / 1000, self._fetch_min_bytes


@pytest.mark.parametrize(
    ("linger_s", "busy", "calm"),
    [(0.0, (BUSY_S, 1), (CALM_S, 1)), (0.1, (0.1, LINGER_BYTES), (0.1, LINGER_BYTES))],
)
def test_fetches_wait_long_only_when_idle(linger_s, busy, calm):
    """S6: an idle processor fetches once a second, and less often later. From the first record on,
    and in a new assignment, fetches are quick again. When idle, the first byte ends a fetch, also
    one that lingers under load."""
    fetcher, now_s = Fetcher(), 0.0
    FetchWait(fetcher, lambda: now_s, linger_s)
    first, second = Assignment(one=State()), Assignment(one=State(), two=State())
    (long_after_s, long_s), (after_s, quiet_s) = RESTS
    assert fetcher.terms(first) == calm
    now_s += after_s
    assert fetcher.terms(first) == (quiet_s, 1)
    now_s += long_after_s - after_s
    assert fetcher.terms(first) == (long_s, 1)
    fetcher._records["one"] = "not yet taken"
    assert fetcher.terms(first) == busy
    fetcher._records.clear()
    now_s += after_s * 0.9
    assert fetcher.terms(first) == calm
    now_s += after_s
    assert fetcher.terms(first) == (quiet_s, 1)
    assert fetcher.terms(second) == calm
    assert fetcher.asked[-1] is second


@pytest.mark.parametrize("left_out", [State(paused=True), State(has_valid_position=False)])
def test_a_fetch_of_some_partitions_is_short(left_out):
    """S6: a broker answers one fetch after the other. So a fetch that omits a partition (its
    records are not taken yet, it is paused, or its position is unknown) is short. One of all
    partitions ends with the first record of any."""
    fetcher = Fetcher()
    FetchWait(fetcher, lambda: 0.0)
    assignment = Assignment(one=State(), two=State())
    assert fetcher.terms(assignment) == (CALM_S, 1)
    fetcher._records["one"] = "not yet taken"
    assert fetcher.terms(assignment) == (BUSY_S, 1)
    fetcher._records.clear()
    assignment["two"] = left_out
    assert fetcher.terms(assignment) == (BUSY_S, 1)
