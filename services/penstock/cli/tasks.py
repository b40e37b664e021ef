"""The verbs about tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.progress import Progress

from penstock.cli.gateway import client, gateway_option, labels_of, without_nothing
from penstock.cli.numbers import Whole
from penstock.cli.output import (
    as_json,
    console,
    counts_text,
    fields,
    moment,
    print_json,
    progress,
    state_text,
    table,
)
from penstock.cli.reading import CALLBACK_FORMS, Lines, callbacks_of, context_of
from penstock.client import Submitted, SyncClient, Task
from penstock.core.task import FINAL, Priority, State
from penstock.errors import Invalid, NotFound
from penstock.http.problems import relocated

_AMISS = 1
_LATEST = 20

_PRIORITY = click.Choice([priority.name for priority in Priority], case_sensitive=False)
_STATE = click.Choice([state.value for state in State])


@click.command()
@click.argument("type_", metavar="TYPE", required=False)
@click.option("--context", metavar="VALUE", help="The context; @FILE reads a file, - standard input.")
@click.option(
    "--content-type",
    type=click.Choice(["json", "text", "url", "bytes"]),
    default="json",
    show_default=True,
    help="What kind of value the context is.",
)
@click.option(
    "--file", "file", metavar="FILE", help="Many tasks: one JSON object a line; - is standard input."
)
@click.option("--stage", help="Where to begin; default: the type's first stage.")
@click.option("--priority", type=_PRIORITY, help="Default: MEDIUM.")
@click.option("--key", help="Tenant or resource that it counts for in limits and turns of its type.")
@click.option("--idempotency-key", help="Submitting it again returns the first task.")
@click.option("--run-at", metavar="MOMENT", help="Not before this moment, such as 2026-12-01T06:00:00Z.")
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="URL|JSON|@FILE",
    help=f"Called when it ends; {CALLBACK_FORMS}",
)
@click.option("--no-callbacks", is_flag=True, help="No callbacks, though the type has some.")
@click.option("--events", type=click.Choice(["final", "all"]), help="Which transitions are reported.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@click.option(
    "--watch", "watch_", is_flag=True, help="Wait until all have ended; status 1 unless all succeed."
)
@gateway_option
@as_json
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    type_: str | None,
    context: str | None,
    content_type: str,
    file: str | None,
    watch_: bool,
    gateway: str | None,
    json_: bool,
    **given: Any,
) -> None:
    """Submits one task, or with --file many.

    With --file the other options are defaults for what a line leaves out. A line is an object such as
    {"type": "media", "context": {"file": "a.mp4"}, "priority": "HIGH"}.
    """
    if not type_ and file is None:
        raise click.UsageError("give a TYPE, or --file with many tasks")
    if file is not None and (given["idempotency_key"] or context):
        raise click.UsageError(
            "--idempotency-key and --context are for one task; put them into the lines of --file"
        )
    if given["callbacks"] and given["no_callbacks"]:
        raise click.UsageError("give --callback or --no-callbacks, but not both")
    wire = without_nothing(
        type=type_,
        stage=given["stage"],
        priority=given["priority"],
        key=given["key"],
        idempotency_key=given["idempotency_key"],
        run_at=given["run_at"],
        callbacks=callbacks_of(given["callbacks"], none=given["no_callbacks"]),
        events=given["events"],
        labels=labels_of(given["labels"]),
    )
    if context is not None:
        wire |= {"content_type": content_type, "context": context_of(context, content_type)}
    with client(gateway) as found:
        lines = Lines(file, wire) if file is not None else None
        submitted = _submit_many(found, lines, quiet=json_) if lines else [_submit_one(found, wire)]
        _tell(submitted, single=lines is None, json_=json_)
        if watch_:
            ctx.exit(_watch(found, [one.id for one in submitted], json_=json_))


def _submit_one(found: SyncClient, wire: Mapping[str, Any]) -> Submitted:
    try:
        [submitted] = found.submit_many([wire])
    except Invalid as error:
        # It went as a batch of one, which the user need not know.
        raise relocated(error, lambda pointer: pointer.removeprefix("/0")) from None
    return submitted


def _submit_many(found: SyncClient, lines: Lines, *, quiet: bool) -> Sequence[Submitted]:
    with progress(quiet=quiet) as bar:
        task = bar.add_task("submitting", total=len(lines))
        try:
            return found.submit_many(lines, progress=lambda count: bar.advance(task, count))
        except Invalid as error:
            raise lines.located(error) from error


def _tell(submitted: Sequence[Submitted], *, single: bool, json_: bool) -> None:
    if json_:
        for one in submitted:
            print_json({"id": one.id, "created": one.created})
    elif single:
        [one] = submitted
        click.echo(f"task {one.id} {'submitted' if one.created else 'was there already, under the same key'}")
    else:
        created = sum(one.created for one in submitted)
        ids = f": ids {submitted[0].id} to {submitted[-1].id}" if submitted else ""
        click.echo(f"{created:,} tasks submitted, {len(submitted) - created:,} were there already{ids}")


@click.command()
@click.argument("task_id", type=Whole(1))
@gateway_option
@as_json
def get(task_id: int, gateway: str | None, json_: bool) -> None:
    """Shows everything about one task: context, result, attempts, callbacks."""
    with client(gateway) as found:
        task = found.get(task_id)
    if json_:
        print_json(task.raw)
    else:
        _show(task)


def _show(task: Task) -> None:
    raw = task.raw
    pairs: list[tuple[str, Any]] = [
        ("task", f"{task.id} ({task.type})"),
        ("state", state_text(task.state)),
        ("stage", f"{task.stage}, attempt {task.attempt}"),
        ("priority", task.priority.name),
        ("context", _short(task.context if "context" in raw else raw.get("context_error"))),
    ]
    pairs += [("result", _short(task.result))] if task.result is not None else []
    pairs += [("labels", ", ".join(f"{k}={v}" for k, v in task.labels.items()))] if task.labels else []
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
                    _why(attempt["error"]),
                )
                for attempt in task.attempts
            ),
        )
    if raw["callbacks_owed"]:
        click.echo()
        table(
            ("callback to", "state", "attempts", "error"),
            ((c["target"], c["state"], str(c["attempt"]), c["error"] or "") for c in raw["callbacks_owed"]),
        )
    if task.error and task.error.get("traceback"):
        click.echo(f"\n{task.error['traceback']}")


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 2000 else f"{text[:2000]} … ({len(text):,} characters; --json shows all)"


def _why(error: Mapping[str, str] | None) -> str:
    return f"{error['kind']}: {error['message']}" if error else ""


@click.command("list")
@click.option("--type", "type_", help="Task type.")
@click.option("--state", "states", multiple=True, type=_STATE, help="Repeatable.")
@click.option("--stage", help="Stage.")
@click.option("--key", help="Key: tenant or resource.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Repeatable; all must match.")
@click.option("--idempotency-key", help="Idempotency key.")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most tasks.")
@click.option("--all", "all_", is_flag=True, help="No limit.")
@gateway_option
@as_json
def list_(gateway: str | None, json_: bool, limit: int, all_: bool, **given: Any) -> None:
    """Lists tasks, newest first."""
    with client(gateway) as found:
        tasks = found.list(**_filters(given), limit=None if all_ else limit)
        if json_:
            for task in tasks:
                print_json(task.raw)
            return
        rows = [
            (
                str(task.id),
                task.type,
                state_text(task.state),
                task.stage,
                str(task.attempt),
                task.priority.name,
                moment(task.raw["created_at"]),
                ", ".join(f"{k}={v}" for k, v in task.labels.items()),
                _why(task.error)[:80],
            )
            for task in tasks
        ]
    if rows:
        table(("id", "type", "state", "stage", "attempt", "priority", "created", "labels", "error"), rows)
    else:
        console().print("no tasks")


def _filters(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": given.get("type_"),
        "state": given.get("states") or (),
        "stage": given.get("stage"),
        "key": given.get("key"),
        "labels": labels_of(given.get("labels") or ()),
        "idempotency_key": given.get("idempotency_key"),
    }


@click.command()
@click.argument("ids", metavar="ID...", type=Whole(1), nargs=-1, required=True)
@gateway_option
@as_json
def cancel(ids: tuple[int, ...], gateway: str | None, json_: bool) -> None:
    """Cancels tasks that have not ended; status 4 if an id is no task's."""
    with client(gateway) as found:
        told = found.cancel(ids)
    if json_:
        print_json(dataclasses.asdict(told))
    else:
        ended = len(told.unchanged)
        click.echo(f"{len(told.cancelled):,} cancelled" + (f", {ended:,} had ended" if ended else ""))
    if told.unknown:
        raise NotFound(f"there is no task {_listed(told.unknown)}")


def _listed(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:_LATEST]))
    return shown if len(ids) <= _LATEST else f"{shown} and {len(ids) - _LATEST:,} more"


@click.command()
@click.argument("ids", metavar="[ID...]", type=Whole(1), nargs=-1)
@click.option("--type", "type_", help="Instead of ids: all present tasks of this type.")
@click.option("--state", "states", multiple=True, type=_STATE, help="Instead of ids: in this state now.")
@click.option("--stage", help="Instead of ids: in this stage now.")
@click.option("--key", help="Instead of ids: of this key.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Instead of ids; repeatable.")
@gateway_option
@as_json
@click.pass_context
def watch(
    ctx: click.Context, /, ids: tuple[int, ...], gateway: str | None, json_: bool, **given: Any
) -> None:
    """Follows tasks until all have ended; status 1 unless all succeed.

    With filters instead of ids it follows those that match when it starts.
    """
    filters = any(given.values())
    if bool(ids) == filters:
        raise click.UsageError("give ids, or filters, but not both")
    with client(gateway) as found:
        wanted = list(ids) if ids else [task.id for task in found.list(**_filters(given))]
        ctx.exit(_watch(found, wanted, json_=json_))


def _watch(found: SyncClient, ids: Sequence[int], *, json_: bool) -> int:
    """Follows tasks; returns the exit status."""
    counts: Mapping[str, int] = {}
    with progress(quiet=json_) as bar:
        task = bar.add_task("", total=len(set(ids)))
        for counts in found.watch(ids):
            if json_:
                print_json({"states": counts})
            _advance(bar, task, counts)
    if not json_:
        click.echo(counts_text(counts))
    return 0 if set(counts) <= {State.SUCCEEDED} else _AMISS


def _advance(bar: Progress, task: Any, counts: Mapping[str, int]) -> None:
    ended = sum(count for state, count in counts.items() if state in FINAL)
    bar.update(task, completed=ended, description=counts_text(counts))
