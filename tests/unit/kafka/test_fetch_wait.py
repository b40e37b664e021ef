"""The wait of fetches at the broker."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.kafka.client.fetch_wait import BUSY_S, CALM_S, RESTS, FetchWait

TIMEOUT_S = 0.2


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
        self._fetcher_timeout = 0.2
        self.asked = []

    def _get_actions_per_node(self, assignment):
        self.asked.append(assignment)
        return ["a fetch"], {"node": "a reset"}, TIMEOUT_S, False, ["resumed"]

    def wait_s(self, assignment):
        """How long the fetch that is planned now waits."""
        assert self._get_actions_per_node(assignment)[0] == ["a fetch"]
        return self._fetch_max_wait_ms / 1000


def test_fetches_wait_long_only_when_idle():
    """S6: an idle processor fetches once a second, and less often later. From the first record on,
    and in a new assignment, fetches are quick again."""
    fetcher, now_s = Fetcher(), 0.0
    FetchWait(fetcher, lambda: now_s)
    first, second = Assignment(one=State()), Assignment(one=State(), two=State())
    (long_after_s, long_s), (after_s, quiet_s) = RESTS
    assert fetcher.wait_s(first) == CALM_S
    now_s += after_s
    assert fetcher.wait_s(first) == quiet_s
    now_s += long_after_s - after_s
    assert fetcher.wait_s(first) == long_s
    fetcher._records["one"] = "not yet taken"
    assert fetcher.wait_s(first) == BUSY_S
    fetcher._records.clear()
    now_s += after_s * 0.9
    assert fetcher.wait_s(first) == CALM_S
    now_s += after_s
    assert fetcher.wait_s(first) == quiet_s
    assert fetcher.wait_s(second) == CALM_S
    assert fetcher.asked[-1] is second


@pytest.mark.parametrize("left_out", [State(paused=True), State(has_valid_position=False)])
def test_a_fetch_of_some_partitions_is_short(left_out):
    """S6: a broker answers one fetch after the other. So a fetch that omits a partition (its
    records are not taken yet, it is paused, or its position is unknown) is short. One of all
    partitions ends with the first record of any."""
    fetcher = Fetcher()
    FetchWait(fetcher, lambda: 0.0)
    assignment = Assignment(one=State(), two=State())
    assert fetcher.wait_s(assignment) == CALM_S
    fetcher._records["one"] = "not yet taken"
    assert fetcher.wait_s(assignment) == BUSY_S
    fetcher._records.clear()
    assignment["two"] = left_out
    assert fetcher.wait_s(assignment) == BUSY_S


def test_fetches_keep_a_gap_under_load():
    """S6: records that come within the gap share the next fetch. A record that ends a rest is
    returned at once, and what is no fetch waits for nothing."""
    fetcher, now_s, gap_s = Fetcher(), 100.0, 0.02
    FetchWait(fetcher, lambda: now_s, lambda: gap_s)
    assignment = Assignment(one=State(), two=State())
    assert fetcher.wait_s(assignment) == CALM_S
    now_s += 0.3
    fetcher._records["one"] = "just returned"
    waits = ([], {"node": "a reset"}, pytest.approx(0.02), False, ["resumed"])
    assert fetcher._get_actions_per_node(assignment) == waits
    fetcher._records.clear()
    now_s += 0.015
    assert fetcher._get_actions_per_node(assignment)[2] == pytest.approx(0.005)
    now_s += 0.005
    assert fetcher.wait_s(assignment) == CALM_S
    gap_s = 10.0
    fetcher._records["one"] = "just returned"
    assert fetcher._get_actions_per_node(assignment)[2] == TIMEOUT_S
    fetcher._records.clear()
    gap_s = 0.0
    assert fetcher.wait_s(assignment) == CALM_S


def test_records_that_are_not_taken_delay_other_partitions_by_one_gap():
    """S6: otherwise a partition that is full would keep the others from being read."""
    fetcher, now_s = Fetcher(), 100.0
    FetchWait(fetcher, lambda: now_s, lambda: 0.02)
    assignment = Assignment(one=State(), two=State())
    fetcher._records["one"] = "not yet taken"
    assert fetcher._get_actions_per_node(assignment)[0] == []
    now_s += 0.02
    assert fetcher.wait_s(assignment) == BUSY_S
    fetcher._records["two"] = "just returned"
    assert fetcher._get_actions_per_node(assignment)[0] == []


def test_an_idle_fetch_that_omits_a_partition_waits_as_short_as_possible():
    """S6: the fetch of a partition that is resumed waits for the one that omits it."""
    fetcher, now_s = Fetcher(), 0.0
    FetchWait(fetcher, lambda: now_s)
    assignment = Assignment(one=State(), two=State(paused=True))
    assert fetcher.wait_s(assignment) == BUSY_S
    now_s = RESTS[0][0]
    assert fetcher.wait_s(assignment) == RESTS[-1][1]
