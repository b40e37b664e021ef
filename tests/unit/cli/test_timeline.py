"""`penstock get`: the table of the stages that a task has entered."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli

QUEUED, STARTED, ENDED = (f"2026-11-21T09:29:{second}Z" for second in ("00", "01.25", "03"))
ATTEMPT: dict[str, Any] = {
    "attempt": 0,
    "outcome": "next",
    "worker": "w",
    "queued_at": QUEUED,
    "started_at": STARTED,
    "finished_at": ENDED,
    "error": None,
}
RUNNING = {**ATTEMPT, "outcome": None, "finished_at": None}


def test_get_shows_stages_with_their_inputs_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3, O8: each stage has its input once, and each attempt its times; a running one no end."""
    raw: dict[str, Any] = {"id": 7, "type": "media", "stage": "end", "attempt": 0, "priority": "LOW"}
    raw |= {"labels": {}, "context": None, "error": None, "state": "running", "callbacks_owed": []}
    raw |= dict.fromkeys(("created_at", "due_at", "finished_at")) | {"rerun_of": 6}
    failed = {**ATTEMPT, "outcome": "fail", "error": {"kind": "E", "message": "no"}}
    raw["timeline"] = [
        {"step": 0, "stage": "probe", "input": {"n": 1}, "input_size": 7, "attempts": [failed, ATTEMPT]},
        {"step": 1, "stage": "cut", "input_ref": {}, "input_size": 5000, "attempts": [ATTEMPT]},
        {"step": 2, "stage": "old", "attempts": [{**ATTEMPT, "queued_at": None}]},
        {"step": 3, "stage": "end", "input": "x" * 50, "input_size": 52, "attempts": [RUNNING]},
    ]

    async def answer(*_request: Any, **_options: Any) -> dict[str, Any]:
        return raw

    monkeypatch.setattr("penstock.client.Client._request", answer)
    arguments = ["get", "7", "--gateway", "http://127.0.0.1:1"]
    outcome = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200", "TZ": "UTC"})
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert any(line.split() == ["rerun", "of", "task", "6"] for line in lines)
    head = next(number for number, line in enumerate(lines) if line.startswith("stage") and "input" in line)
    assert lines[head].split() == [
        *("stage", "input", "attempt", "outcome", "worker", "queued", "waited", "ran", "ended", "error")
    ]
    rows = lines[head + 1 : head + 6]
    assert rows[0].startswith('probe  {"n": 1}')
    assert "1.250 s" in rows[0]
    assert "1.750 s" in rows[0]
    assert rows[0].endswith("E: no")
    assert rows[1].split()[:2] == ["0", "next"]
    assert rows[2].startswith("cut    5,000 bytes")
    assert rows[3].startswith("old    not kept")
    assert rows[4].split()[:5] == ["end", "x" * 40, "…", "0", "running"]
    assert "1.750 s" not in rows[4]
