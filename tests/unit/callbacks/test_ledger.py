"""How long batches of claims and outcomes wait for more."""

from __future__ import annotations

import pytest

from penstock.callbacks.ledger import claim_linger_s, outcome_linger_s


@pytest.mark.parametrize(("previous", "expected_s"), [(0, 0.0), (3, 0.0), (4, 0.005), (1000, 0.005)])
def test_claims_wait_only_under_load(previous: int, expected_s: float) -> None:
    """C7b: a call waits for its claim, so a small batch is written at once."""
    assert claim_linger_s(previous) == expected_s


@pytest.mark.parametrize(("previous", "expected_s"), [(0, 0.02), (49, 0.02), (50, 0.05), (1000, 0.05)])
def test_outcomes_wait_longer_under_load(previous: int, expected_s: float) -> None:
    """C7b: one statement records many outcomes, but a crash repeats no more than 50 ms of calls."""
    assert outcome_linger_s(previous) == expected_s
