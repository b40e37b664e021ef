"""`penstock submit --watch`: what it prints about the end of its task."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.client import Submitted

FAILURE = {"kind": "ValueError", "message": "no such file"}


@pytest.mark.parametrize(
    ("status", "end", "shown"),
    [
        (0, {"state": "succeeded", "result": {"n": 1}}, 'result: {"n": 1}'),
        (1, {"state": "failed", "error": FAILURE}, "error in stage probe: ValueError: no such file"),
    ],
)
def test_submit_and_watch_prints_the_result_or_the_error(
    monkeypatch: pytest.MonkeyPatch, status: int, end: dict[str, Any], shown: str
) -> None:
    """O8: counts of states alone would need another command."""
    raw: dict[str, Any] = {"id": 7, "type": "media", "stage": "probe", "attempt": 0, "priority": "LOW"}
    raw |= {"labels": {}, "context": None, "result": None, "result_type": "json", "error": None, **end}

    async def answer(*_request: Any, **_options: Any) -> dict[str, Any]:
        return raw

    monkeypatch.setattr("penstock.client.Client._request", answer)
    monkeypatch.setattr("penstock.cli.tasks._submit_one", lambda *_arguments: Submitted(id=7, created=True))
    monkeypatch.setattr("penstock.cli.tasks.warn_unserved", lambda *_arguments: None)
    monkeypatch.setattr("penstock.cli.tasks.watch_tasks", lambda *_arguments, **_options: status)
    outcome = CliRunner().invoke(cli, ["submit", "media", "--watch", "--gateway", "http://127.0.0.1:1"])
    assert outcome.exit_code == status, outcome.output
    assert outcome.stdout.splitlines() == ["task 7 submitted", shown]
