"""How long fetches wait at the broker."""

from __future__ import annotations

import pytest

from penstock.kafka.fetching import BUSY_S, LINGER_BYTES, RESTS, Fetching


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

    def terms(self, assignment="first"):
        """Wait in seconds and fewest bytes of the fetch that is planned now."""
        assert self._get_actions_per_node(assignment) == "what to do"
        return self._fetch_max_wait_ms / 1000, self._fetch_min_bytes


@pytest.mark.parametrize(("linger_s", "busy"), [(0.0, (BUSY_S, 1)), (0.1, (0.1, LINGER_BYTES))])
def test_fetches_wait_long_only_at_rest(linger_s, busy):
    """S6: an idle processor asks the broker once a second, and less often after a while; from the first record on, and in a new assignment, fetches are as
    quick as ever. At rest the first byte ends a fetch, also of who lingers under load."""
    fetcher, now_s = Fetcher(), 0.0
    Fetching(fetcher, lambda: now_s, linger_s)
    (long_after_s, long_s), (after_s, quiet_s) = RESTS
    assert fetcher.terms() == busy
    now_s += after_s
    assert fetcher.terms() == (quiet_s, 1)
    now_s += long_after_s - after_s
    assert fetcher.terms() == (long_s, 1)
    fetcher._records["partition"] = "not yet taken"
    assert fetcher.terms() == busy
    fetcher._records.clear()
    now_s += after_s * 0.9
    assert fetcher.terms() == busy
    now_s += after_s
    assert fetcher.terms() == (quiet_s, 1)
    assert fetcher.terms("second") == busy
    assert fetcher.asked[-1] == "second"
