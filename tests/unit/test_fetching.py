"""How long fetches wait at the broker."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.kafka.fetching import BUSY_S, CALM_S, LINGER_BYTES, RESTS, Fetching


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
    """The part of aiokafka's that is used."""

    def __init__(self):
        self._records = {}
        self._fetch_max_wait_ms = 500
        self._fetch_min_bytes = 1
        self.asked = []

    def _get_actions_per_node(self, assignment):
        self.asked.append(assignment)
        return "what to do"

    def terms(self, assignment):
        """Wait in seconds and fewest bytes of the fetch that is planned now."""
        assert self._get_actions_per_node(assignment) == "what to do"
        return self._fetch_max_wait_ms / 1000, self._fetch_min_bytes


@pytest.mark.parametrize(
    ("linger_s", "busy", "calm"),
    [(0.0, (BUSY_S, 1), (CALM_S, 1)), (0.1, (0.1, LINGER_BYTES), (0.1, LINGER_BYTES))],
)
def test_fetches_wait_long_only_at_rest(linger_s, busy, calm):
    """S6: an idle processor asks the broker once a second, and less often after a while; from the first record on, and in a new assignment, fetches are as
    quick as ever. At rest the first byte ends a fetch, also of who lingers under load."""
    fetcher, now_s = Fetcher(), 0.0
    Fetching(fetcher, lambda: now_s, linger_s)
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
def test_a_fetch_of_some_partitions_keeps_none_of_the_others_waiting(left_out):
    """S6: a broker answers one fetch after the other, so one that leaves a partition out (records of it are not yet taken,
    it is paused, or where to begin is not known) is back soon; one of all partitions ends with the first record of any."""
    fetcher = Fetcher()
    Fetching(fetcher, lambda: 0.0)
    assignment = Assignment(one=State(), two=State())
    assert fetcher.terms(assignment) == (CALM_S, 1)
    fetcher._records["one"] = "not yet taken"
    assert fetcher.terms(assignment) == (BUSY_S, 1)
    fetcher._records.clear()
    assignment["two"] = left_out
    assert fetcher.terms(assignment) == (BUSY_S, 1)
