"""How single tasks are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.output import fields, moment, print_document, shorten, state_text, table
from penstock.client import Task, TaskProgress
from penstock.contracts.progress import progress_line


def print_end(task: Task, *, json_: bool) -> None:
    """The result or the error of an ended task."""
    if json_:
        print_document(task.raw)
    elif task.result is not None:
        click.echo(f"result: {_shorten(task.result)}")
    elif task.error:
        click.echo(f"error in stage {task.stage}: {error_text(task.error)}")


def progress_text(progress: TaskProgress) -> str:
    """A report of progress on one line: 40 %, frame 1,200 of 3,000."""
    return progress_line(progress.fraction, progress.message)


def print_task(task: Task) -> None:
    """A task with its attempts and callbacks."""
    raw = task.raw
    pairs: list[tuple[str, Any]] = [
        ("task", f"{task.id} ({task.type})"),
        ("state", state_text(task.state)),
        ("stage", f"{task.stage}, attempt {task.attempt}"),
        ("priority", task.priority.name),
        ("context", _shorten(task.context if "context" in raw else raw.get("context_error"))),
    ]
    pairs += [("progress", progress_text(task.progress))] if task.progress else []
    pairs += [("result", _shorten(task.result))] if task.result is not None else []
    pairs += [("labels", ", ".join(f"{k}={v}" for k, v in task.labels.items()))] if task.labels else []
    if flow := raw.get("flow"):
        item = f", item {flow['item']}" if "item" in flow else ""
        pairs += [("flow", f"{flow['id']}, node {flow['node']}{item}, generation {flow['generation']}")]
    for name in ("key", "idempotency_key", "worker"):
        pairs += [(name.replace("_", " "), raw[name])] if raw.get(name) else []
    for name in ("created_at", "due_at", "finished_at"):
        pairs += [(name.removesuffix("_at"), moment(raw[name]))] if raw[name] else []
    fields(pairs)
    if task.attempts:
        click.echo()
        table(
            ("stage", "attempt", "outcome", "worker", "ended", "error"),
            (
                (
                    attempt["stage"],
                    str(attempt["attempt"]),
                    attempt["outcome"],
                    attempt["worker"] or "",
                    moment(attempt["finished_at"]),
                    error_text(attempt["error"]),
                )
                for attempt in task.attempts
            ),
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


def _shorten(value: Any) -> str:
    # JSON can be submitted again.
    structured = isinstance(value, Mapping | list)
    text = json.dumps(value, ensure_ascii=False) if structured else str(value)
    return shorten(text)


def error_text(error: Mapping[str, str] | None) -> str:
    """An error of an attempt as one line."""
    return f"{error['kind']}: {error['message']}" if error else ""
