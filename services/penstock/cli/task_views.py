"""How single tasks are printed, and how tasks are watched.

A watch has a bar of all tasks, and one of each running task that reports its progress.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import click
from rich.markup import escape
from rich.progress import Progress, TaskID

from penstock.cli.output import (
    counts_text,
    fields,
    moment,
    print_document,
    progress,
    shorten,
    state_text,
    table,
)
from penstock.client import SyncClient, Task, TaskProgress
from penstock.contracts.progress import progress_line
from penstock.core.task import FINAL, State

# The exit status when a watched task did not succeed.
EXIT_NOT_SUCCEEDED = 1
# Characters of an input in the table of the stages.
_INPUT_LENGTH = 40
# Bars of running tasks beside the bar of all.
MAX_BARS = 10


def print_end(task: Task, *, json_: bool) -> None:
    """The result or the error of an ended task."""
    if json_:
        print_document(task.raw)
    elif task.result is not None:
        click.echo(f"result: {_shorten(task.result)}")
    elif task.error:
        click.echo(f"error in stage {task.stage}: {error_text(task.error)}")


def print_task(task: Task) -> None:
    """A task with its stages, their attempts, and its callbacks."""
    raw = task.raw
    pairs: list[tuple[str, Any]] = [
        ("task", f"{task.id} ({task.type})"),
        ("state", state_text(task.state)),
        ("stage", f"{task.stage}, attempt {task.attempt}"),
        ("priority", task.priority.name),
        ("context", _shorten(task.context if "context" in raw else raw.get("context_error"))),
    ]
    pairs += (
        [("progress", progress_line(task.progress.fraction, task.progress.message))] if task.progress else []
    )
    pairs += [("result", _shorten(task.result))] if task.result is not None else []
    pairs += [("labels", ", ".join(f"{k}={v}" for k, v in task.labels.items()))] if task.labels else []
    if flow := raw.get("flow"):
        item = f", item {flow['item']}" if "item" in flow else ""
        pairs += [("flow", f"{flow['id']}, node {flow['node']}{item}, generation {flow['generation']}")]
    pairs += [("rerun of", f"task {raw['rerun_of']}")] if raw.get("rerun_of") else []
    for name in ("key", "idempotency_key", "worker"):
        pairs += [(name.replace("_", " "), raw[name])] if raw.get(name) else []
    for name in ("created_at", "due_at", "finished_at"):
        pairs += [(name.removesuffix("_at"), moment(raw[name]))] if raw[name] else []
    fields(pairs)
    if raw.get("timeline"):
        click.echo()
        table(
            ("stage", "input", "attempt", "outcome", "worker", "queued", "waited", "ran", "ended", "error"),
            _timeline_rows(task),
        )
    if raw["callbacks_owed"]:
        click.echo()
        table(
            ("callback to", "state", "attempts", "error"),
            (
                (callback["target"], callback["state"], str(callback["attempt"]), callback["error"] or "")
                for callback in raw["callbacks_owed"]
            ),
        )
    if task.error and task.error.get("traceback"):
        click.echo(f"\n{task.error['traceback']}")
    if failed := [attempt["log"] for attempt in task.attempts if attempt["error"] and "log" in attempt]:
        click.echo(f"\nThe log of the last attempt that failed: {log_command(failed[-1])}")


def _timeline_rows(task: Task) -> Iterator[Sequence[str]]:
    """The rows of the attempts, each stage with its input in its first row."""
    for step in task.raw["timeline"]:
        stage, shown = step["stage"], _input_text(step)
        if not step["attempts"]:
            yield stage, shown, "", "", "", "", "", "", "", ""
        for attempt in step["attempts"]:
            queued, started, finished = (attempt[f"{name}_at"] for name in ("queued", "started", "finished"))
            yield (
                stage,
                shown,
                str(attempt["attempt"]),
                attempt["outcome"] or ("running" if started else "queued"),
                attempt["worker"] or "",
                moment(queued),
                _took(queued, started),
                _took(started, finished),
                moment(finished),
                error_text(attempt["error"]),
            )
            stage = shown = ""


def _input_text(step: Mapping[str, Any]) -> str:
    if "input" not in step:
        return f"{step['input_size']:,} bytes" if "input_size" in step else "not kept"
    text = _shorten(step["input"])
    return text if len(text) <= _INPUT_LENGTH else f"{text[:_INPUT_LENGTH]} …"


def _took(since: str | None, until: str | None) -> str:
    """The seconds between two moments of the API; clocks of hosts may differ by a little."""
    if not since or not until:
        return ""
    took = datetime.fromisoformat(until) - datetime.fromisoformat(since)
    return f"{max(took.total_seconds(), 0.0):.3f} s"


def _shorten(value: Any) -> str:
    # JSON can be submitted again.
    structured = isinstance(value, Mapping | list)
    text = json.dumps(value, ensure_ascii=False) if structured else str(value)
    return shorten(text)


def error_text(error: Mapping[str, str] | None) -> str:
    """An error of an attempt as one line."""
    return f"{error['kind']}: {error['message']}" if error else ""


def print_failure(figures: Mapping[str, Any]) -> None:
    """The last attempt that failed, by the figures of an answer about a task."""
    if "traceback" in figures:
        click.echo(f"\n{figures['traceback'].rstrip()}")
    if "log" in figures:
        click.echo(f"\nThe log of the last attempt that failed: {log_command(figures['log'])}")


def log_command(path: str) -> str:
    """The command that prints a log.

    Args:
        path: of the log, such as `/tasks/81/logs/0/2`.
    """
    _, _, task_id, _, step, attempt = path.split("/")
    return f"penstock logs {task_id} --step {step} --attempt {attempt}"


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
                # Without a fraction the bar only moves.
                self._of_tasks[task_id] = self._bars.add_task("", total=None)
            done = None if report.fraction is None else int(report.fraction * 100)
            # rich would take brackets in a message for markup.
            text = escape(f"task {task_id}: {progress_line(report.fraction, report.message)}")
            self._bars.update(
                self._of_tasks[task_id],
                total=None if done is None else 100,
                completed=done or 0,
                description=text,
            )
