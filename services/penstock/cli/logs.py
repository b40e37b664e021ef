"""The verb that prints the log of a task, or that of a deployment on this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
# Options that the log of a deployment has as well.
_OF_ANY = ("tail", "grep")


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
@click.option("--flow", "flow_id", type=Whole(1), help="In place of the ID of a task: a flow, with --node.")
@click.option("--node", metavar="NAME", help="With --flow: the node whose task has the log.")
@click.option("--item", type=Whole(0), help="With --node, if that is a map: the item.")
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
    flow_id: int | None,
    **options: Any,
) -> None:
    """Prints what the handlers of a task have logged, attempt after attempt.

    Without an ID it prints the log of the deployment that `penstock up` runs in this directory: all
    its services and servers. --tail, --grep and --follow apply to that as well.
    """
    if flow_id is not None and (options["node"] is None or task_id is not None):
        raise click.UsageError("--flow needs --node, and no ID of a task")
    if task_id is None and flow_id is None:
        unused = {"step": step, "attempt": attempt, "json": json_ or None, **options}
        given = [f"--{name}" for name, value in unused.items() if value is not None and name not in _OF_ANY]
        if given:
            raise click.UsageError(f"{', '.join(given)}: only with the ID of a task, or --flow")
        _print_deployment_log(options["tail"], options["grep"] or "", follow=follow)
        return
    node, item = options.pop("node"), options.pop("item")
    options["text"] = options.pop("grep")
    with open_client(gateway) as client:
        if flow_id is not None:
            task_id = _task_of(client, flow_id, node, item)
        assert task_id is not None
        _print_task_log(client, task_id, (step, attempt), options, follow=follow, json_=json_)


def _print_task_log(
    client: SyncClient,
    task_id: int,
    only: tuple[int | None, int | None],
    options: Mapping[str, Any],
    *,
    follow: bool,
    json_: bool,
) -> None:
    printed: set[tuple[int, int]] = set()
    while True:
        # Before its runs are read: a task that has ended begins no further attempt.
        final = client.get(task_id).state in FINAL
        for place in _attempts(client, task_id, follow=follow and not final):
            selected = all(each in (None, found) for each, found in zip(only, place, strict=True))
            if place in printed or not selected:
                continue
            printed.add(place)
            if not json_:
                click.secho(f"--- step {place[0]}, attempt {place[1]}", dim=True, err=True)
            read = client.follow_log if follow else client.log_lines
            for document in read(task_id, *place, **options):
                _print(document, json_=json_)
        if not follow or final:
            return
        time.sleep(LOOK_S)


def _task_of(client: SyncClient, flow_id: int, node: str, item: int | None) -> int:
    """The task of a node of a flow: the last one, when the flow was recovered."""
    found = None
    for child in client.flow_children(flow_id, node):
        if child["item"] is not None and item is None:
            raise click.UsageError(f"node {node} of flow {flow_id} is a map: give --item")
        # They come in the order of items, and of recoveries.
        if child["item"] is not None and item is not None and child["item"] > item:
            break
        if child["item"] == item:
            found = child
    if found is None:
        which = "" if item is None else f", item {item},"
        raise NotFound(f"node {node}{which} of flow {flow_id} has no task")
    if found["task"] is None:
        raise click.UsageError(f"node {node} starts flow {found['flow']['id']}: give --flow with that id")
    task_id: int = found["task"]["id"]
    return task_id


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


def _print(document: Any, *, json_: bool) -> None:
    if "text" not in document:
        # The end of a stream.
        if document["message"]:
            click.secho(f"--- {document['message']}", fg="yellow", err=True)
        return
    print_answer(
        document,
        "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text_of(document)),
        json_=json_,
    )
