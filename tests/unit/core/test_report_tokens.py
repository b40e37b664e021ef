"""Tokens of attempts: what proves a report, and what the worker keeps of them."""

from __future__ import annotations

import base64

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.report_tokens import HEADER, decode_tokens, headers_of_tokens
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.core.report_tokens import ReportTokens
from penstock.errors import SettingsError
from penstock.settings import Reporting
from penstock.worker.held_tokens import HeldTokens

NEW, OLD = (base64.b64encode(letter * 32).decode() for letter in (b"n", b"o"))
ATTEMPT = AttemptId(12, 3, 4)


def test_a_token_is_of_one_attempt_and_one_key() -> None:
    """O5: each part of an attempt's id and the key change the token, also where the digits of two
    ids are the same in a row."""
    attempts = [ATTEMPT, AttemptId(13, 3, 4), AttemptId(12, 4, 4), AttemptId(12, 3, 5), AttemptId(1, 23, 4)]
    tokens = {ReportTokens((key,)).of(attempt) for key in (NEW, OLD) for attempt in attempts}
    assert len(tokens) == 2 * len(attempts)
    assert all(token is not None and len(token) == 16 and "," not in token for token in tokens)


def test_all_keys_check_and_the_first_makes() -> None:
    """O5: during a rotation tokens of both keys prove an attempt; afterwards those of one do."""
    rotating = ReportTokens((NEW, OLD))
    assert rotating.of(ATTEMPT) == ReportTokens((NEW,)).of(ATTEMPT)
    for key in (NEW, OLD):
        assert not rotating.unproven([ATTEMPT], {str(ReportTokens((key,)).of(ATTEMPT))})
    assert ReportTokens((NEW,)).unproven([ATTEMPT], {str(ReportTokens((OLD,)).of(ATTEMPT))}) == {ATTEMPT}


def test_without_keys_nothing_is_asked() -> None:
    """O9: a deployment without keys accepts the reports of workers that know no tokens."""
    tokens = ReportTokens()
    assert not tokens
    assert tokens.of(ATTEMPT) is None
    assert tokens.unproven([ATTEMPT], frozenset()) == set()


def test_a_header_of_any_form_is_read() -> None:
    """O1: a missing, odd or oversized header proves nothing and ends nothing."""
    assert decode_tokens(None) == frozenset()
    assert decode_tokens(b"\xff,a") >= {"a"}
    assert decode_tokens(b"a," * 600_000) == frozenset()
    assert headers_of_tokens([None, "a", "b", "a"]) == [(HEADER, b"a,b")]
    assert headers_of_tokens([None]) == []


def test_a_worker_keeps_a_token_until_it_is_dropped() -> None:
    """O5: reports have the tokens of their attempts, and of no others."""
    held = HeldTokens()
    for id_ in (1, 2, 3):
        token = None if id_ == 3 else f"token-{id_}"
        held.add(ReadyTask(Fence(id_, 0, "s", 0), "t", Context.encode(1), 1_000, token=token))
    assert held.headers([AttemptId(2, 0, 0), AttemptId(3, 0, 0)]) == [(HEADER, b"token-2")]
    held.drop([AttemptId(2, 0, 0), AttemptId(9, 0, 0)])
    assert held.headers([AttemptId(1, 0, 0), AttemptId(2, 0, 0)]) == [(HEADER, b"token-1")]


@pytest.mark.parametrize("key", ["short", base64.b64encode(b"k" * 16).decode(), "ä" * 44])
def test_keys_are_checked_at_the_start(key: str) -> None:
    """O8: a key of another length is refused by its number, and no error or repr shows a key."""
    with pytest.raises(SettingsError, match="PENSTOCK_REPORT_KEYS: number 2") as refused:
        Reporting.load({"PENSTOCK_REPORT_KEYS": f"{NEW},{key}"})
    assert NEW not in str(refused.value)
    assert NEW not in repr(Reporting.load({"PENSTOCK_REPORT_KEYS": NEW}))
