"""The verb that prints the log of a task, or that of a deployment on this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import click

from penstock import discovery
from penstock.cli.deployment import given_data_dir
from penstock.cli.gateway import gateway_option, open_client
from penstock.cli.options import json_option
from penstock.cli.output import print_answer
from penstock.cli.param_types import Moment, Whole
from penstock.client import SyncClient
from penstock.core.log_view import LEVELS, text_of
from penstock.core.task import FINAL
from penstock.errors import NotFound

# Seconds between two looks for the next attempt of a task that is followed.
LOOK_S = 0.5


@click.command()
@click.argument("task_id", metavar="[ID]", type=Whole(1), required=False)
@click.option("--follow", "-f", is_flag=True, help="Also print what is logged later, until the task ends.")
@click.option(
    "--level",
    type=click.Choice(list(LEVELS), case_sensitive=False),
    help="The lowest level. Default: all lines.",
)
@click.option("--grep", metavar="TEXT", help="Only lines with this text, in any case.")
@click.option("--since", type=Moment(), help="Only lines since a moment, or a time ago such as 10m.")
@click.option("--tail", type=click.IntRange(1, 10_000), help="Only the last lines of each attempt.")
@click.option("--step", type=Whole(0), help="Only this step. Default: all.")
@click.option("--attempt", type=Whole(0), help="Only this attempt of each step. Default: all.")
@gateway_option
@json_option
def logs(
    *,
    task_id: int | None,
    follow: bool,
    gateway: str | None,
    json_: bool,
    step: int | None,
    attempt: int | None,
    since: datetime | None,
    **options: Any,
) -> None:
    """Prints what the handlers of a task have logged, attempt after attempt.

    Without an ID it prints the log of the deployment that `penstock up` runs in this directory: all
    its services and servers. --tail, --grep and --follow apply to that as well.
    """
    if task_id is None:
        unused = {"--level": options["level"], "--since": since, "--step": step, "--attempt": attempt}
        given = [name for name, value in unused.items() if value is not None] + ["--json"] * json_
        if given:
            raise click.UsageError(f"{', '.join(given)}: only with the ID of a task")
        _print_deployment_log(options["tail"], options["grep"] or "", follow=follow)
        return
    wanted = {"level": options["level"], "text": options["grep"], "tail": options["tail"]}
    printed: set[tuple[int, int]] = set()
    with open_client(gateway) as client:
        while True:
            # Before its runs are read: a task that has ended begins no further attempt.
            final = client.get(task_id).state in FINAL
            for place in _attempts(client, task_id, follow=follow and not final):
                selected = step in (None, place[0]) and attempt in (None, place[1])
                if place in printed or not selected:
                    continue
                printed.add(place)
                if not json_:
                    click.secho(f"--- step {place[0]}, attempt {place[1]}", dim=True, err=True)
                read = client.follow_log if follow else client.log_lines
                for document in read(task_id, *place, **wanted):
                    _print(document, since, json_=json_)
            if not follow or final:
                return
            time.sleep(LOOK_S)


def _print_deployment_log(tail: int | None, text: str, *, follow: bool) -> None:
    directory = discovery.absolute(given_data_dir() or discovery.data_dir_here())
    try:
        file = (directory / "log" / "penstock.log").open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotFound(
            f"there is no log of a deployment in {directory}: give the ID of a task, or start one with `penstock up`"
        ) from error
    with file:
        # Without a number, line by line: the log may be large.
        lines: Iterable[str] = file if tail is None else deque(_with(text, file), maxlen=tail)
        while True:
            for line in _with(text, lines):
                click.echo(line.rstrip("\n"))
            if not follow:
                return
            time.sleep(LOOK_S)
            # Before the file is read: a deployment that has ended writes nothing more.
            follow = discovery.owner_of(directory) is not None
            lines = file


def _with(text: str, lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if text.lower() in line.lower())


def _attempts(client: SyncClient, task_id: int, *, follow: bool) -> Iterator[tuple[int, int]]:
    """The attempts that have logged anything; when following, also the one that runs."""
    found = {(run["step"], run["attempt"]) for run in client.log_runs(task_id)}
    if follow:
        task = client.get(task_id)
        if task.state in ("queued", "running"):
            found.add((task.raw["step"], task.attempt))
    yield from sorted(found)


def _print(document: Any, since: datetime | None, *, json_: bool) -> None:
    if "text" not in document:
        # The end of a stream.
        if document["message"]:
            click.secho(f"--- {document['message']}", fg="yellow", err=True)
        return
    if since is not None and document["at"] and datetime.fromisoformat(document["at"]) < since:
        return
    print_answer(
        document,
        "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text_of(document)),
        json_=json_,
    )
