"""The bars of `penstock watch`, and of `--watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import pytest
from rich.progress import Progress
from rich.text import Text

from penstock.cli import task_views
from penstock.client import SyncClient, TaskProgress
from penstock.core.task import State


def report(fraction: float | None, message: str) -> TaskProgress:
    return TaskProgress(fraction, message, datetime(2026, 11, 27, tzinfo=UTC))


def test_running_tasks_have_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """H5: beside the bar of all tasks, each running task has one with its last report, and loses it
    with the report. Without a fraction the bar only moves. A message is text, and no markup."""
    monkeypatch.setattr(task_views, "MAX_BARS", 2)
    bars = Progress(disable=True)
    monkeypatch.setattr(task_views, "progress", lambda **_quiet: bars)
    shown: list[list[tuple[str, float, float | None]]] = []

    def note() -> None:
        # As it is drawn: a message that were markup would lose its brackets here, or fail.
        shown.append(
            [(Text.from_markup(bar.description).plain, bar.completed, bar.total) for bar in bars.tasks]
        )

    class Client:
        def watch(
            self, ids: Sequence[int], *, on_progress: Callable[[Mapping[int, TaskProgress]], object]
        ) -> Iterator[Mapping[str, int]]:
            assert ids == [7, 8, 9]
            on_progress({7: report(0.25, r"[bold] \[/x]"), 8: report(None, "opening"), 9: report(0.1, "")})
            yield {State.RUNNING: 3}
            note()
            on_progress({8: report(0.5, "half")})
            yield {State.RUNNING: 1, State.SUCCEEDED: 2}
            note()
            on_progress({})
            yield {State.SUCCEEDED: 3}
            note()

    assert task_views.watch_tasks(cast(SyncClient, Client()), [7, 8, 9], json_=False) == 0
    assert shown == [
        [("3 running", 0, 3), (r"task 7: 25 %, [bold] \[/x]", 25, 100), ("task 8: opening", 0, None)],
        [("1 running, 2 succeeded", 2, 3), ("task 8: 50 %, half", 50, 100)],
        [("3 succeeded", 3, 3)],
    ]
