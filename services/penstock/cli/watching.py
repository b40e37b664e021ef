"""Watches tasks: a bar of all of them, and one of each running task that reports its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from rich.progress import Progress, TaskID

from penstock.cli.output import counts_text, print_document, progress
from penstock.cli.task_views import progress_text
from penstock.client import SyncClient, TaskProgress
from penstock.core.task import FINAL, State

# The exit status when a watched task did not succeed.
EXIT_NOT_SUCCEEDED = 1
# Bars of running tasks beside the bar of all.
MAX_BARS = 10


def watch_tasks(client: SyncClient, ids: Sequence[int], *, json_: bool) -> int:
    """Watches tasks until all have ended, and returns the exit status."""
    counts: Mapping[str, int] = {}
    with progress(quiet=json_) as bars:
        display = _Display(bars, len(set(ids)))
        for counts in client.watch(ids, on_progress=_print_reports if json_ else display.show):
            if json_:
                print_document({"states": counts})
            display.count(counts)
    if not json_:
        click.echo(counts_text(counts))
    return 0 if set(counts) <= {State.SUCCEEDED} else EXIT_NOT_SUCCEEDED


def _print_reports(reports: Mapping[int, TaskProgress]) -> None:
    print_document(
        {
            "progress": [
                {"id": task_id, "fraction": report.fraction, "message": report.message}
                for task_id, report in reports.items()
            ]
        }
    )


class _Display:
    """The bars on a terminal.

    Args:
        bars: draws them.
        tasks: how many are watched.
    """

    def __init__(self, bars: Progress, tasks: int) -> None:
        self._bars = bars
        self._all = bars.add_task("", total=tasks)
        self._of_tasks: dict[int, TaskID] = {}

    def count(self, counts: Mapping[str, int]) -> None:
        """Shows how many tasks have ended."""
        ended = sum(count for state, count in counts.items() if state in FINAL)
        self._bars.update(self._all, completed=ended, description=counts_text(counts))

    def show(self, reports: Mapping[int, TaskProgress]) -> None:
        """Shows the first of the reports in place of the earlier ones."""
        shown = dict([*reports.items()][:MAX_BARS])
        for gone in self._of_tasks.keys() - shown.keys():
            self._bars.remove_task(self._of_tasks.pop(gone))
        for task_id, report in shown.items():
            if task_id not in self._of_tasks:
                self._of_tasks[task_id] = self._bars.add_task("", total=100)
            # Without a fraction the bar only moves.
            done = None if report.fraction is None else int(report.fraction * 100)
            # rich would take brackets in a message for markup.
            text = f"task {task_id}: {progress_text(report)}".replace("[", "\\[")
            self._bars.update(
                self._of_tasks[task_id],
                total=None if done is None else 100,
                completed=done or 0,
                description=text,
            )
