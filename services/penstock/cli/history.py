"""The verbs about history: tasks that ended a while ago, by day."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.deployment import Found, data_dir_option
from penstock.cli.gateway import without_nothing
from penstock.cli.numbers import Finite, Whole
from penstock.cli.output import as_json, console, print_json, table
from penstock.cli.serving import extra, postgres_option
from penstock.settings import Platform

_LATEST = 100


@click.group()
def history() -> None:
    """Days of history: tasks that ended a while ago; task-sync moves them there, archives and drops them."""


@history.command("list")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most days.")
@click.option("--all", "all_", is_flag=True, help="Also days that were dropped, with where their archive is.")
@postgres_option
@data_dir_option
@as_json
def list_(limit: int, *, all_: bool, json_: bool, **given: Any) -> None:
    """Lists days of history, the latest first: how many tasks each has, and whether it is archived or dropped."""
    with extra("services", "history"):
        from penstock.postgres import history as rows  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import open_pool  # noqa: PLC0415 (optional packages)

    async def look(settings: Platform) -> list[dict[str, Any]]:
        async with open_pool(
            settings.postgres, "history", pooled=settings.pooled, writing=False, size=1
        ) as pool:
            return [_document(row) for row in await rows.parts(pool, dropped=all_, limit=limit)]

    with Found(Platform, given).telling("postgres") as settings:
        found = asyncio.run(look(settings))
    if json_:
        for document in found:
            print_json(document)
    elif found:
        table(
            ("day", "part", "tasks", "state", "bytes", "archive"),
            (
                (
                    str(one["day"]),
                    str(one["part"]),
                    f"{one['tasks']:,}",
                    one["state"],
                    "" if one["bytes"] is None else f"{one['bytes']:,}",
                    one["object"] or "",
                )
                for one in found
            ),
        )
    else:
        console().print("no history: tasks move there PENSTOCK_HISTORY_KEEP_DAYS after they have ended")


def _document(row: Any) -> dict[str, Any]:
    known = {name: row[name] for name in ("day", "part", "tasks", "object", "bytes", "sha256")}
    moments = {name: row[name] for name in ("opened_at", "sealed_at", "archived_at", "dropped_at")}
    state = next(
        (word for word in ("dropped", "archived", "sealed") if row[f"{word}_at"]),
        "open",
    )
    return {**known, "state": state, **moments}


@history.command("run")
@click.option("--dry-run", is_flag=True, help="Only say what would be done now.")
@click.option(
    "--keep-days",
    type=Finite(),
    metavar="DAYS",
    help="Move what ended longer ago. Default: $PENSTOCK_HISTORY_KEEP_DAYS or 7.",
)
@click.option(
    "--retain-days",
    type=Finite(),
    metavar="DAYS",
    help="Archive and drop days that were over longer ago. Default: $PENSTOCK_HISTORY_RETAIN_DAYS or 90.",
)
@click.option("--objects", metavar="URL", help="Object store for the archive. Default: $PENSTOCK_OBJECTS.")
@postgres_option
@data_dir_option
@as_json
def run(
    *, dry_run: bool, keep_days: float | None, retain_days: float | None, json_: bool, **given: Any
) -> None:
    """Does now what task-sync does every minute: retires days that are over, and moves what has ended.

    Status 3 while another process is at it; 1 if a day that is over could not be archived.
    """
    with extra("services", "history"):
        from penstock.objects import ObjectStore  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import open_pool  # noqa: PLC0415 (optional packages)
        from penstock.task_sync.history import History, rehearse  # noqa: PLC0415 (optional packages)
        from penstock.task_sync.settings import TaskSyncSettings  # noqa: PLC0415 (optional packages)
    options = without_nothing(history_keep_days=keep_days, history_retain_days=retain_days, **given)

    async def look(settings: TaskSyncSettings) -> dict[str, Any]:
        async with open_pool(settings.postgres, "history", pooled=settings.pooled, size=1) as pool:
            return await rehearse(settings, pool)

    async def act(settings: TaskSyncSettings) -> dict[str, Any]:
        found = History(settings, ObjectStore(settings.objects))
        while await found.round():
            pass
        # What was moved may be of days that are over.
        await found.round()
        left = await look(settings)
        return {
            "moved": found.moved,
            "archived": found.archived,
            "archived_bytes": found.archived_bytes,
            "dropped": found.dropped,
            "left": left["retired"],
        }

    with Found(TaskSyncSettings, options).telling("postgres", "objects") as settings:
        told = asyncio.run(look(settings) if dry_run else act(settings))
    if json_:
        print_json({"dry_run": dry_run, **told})
    elif dry_run:
        _rehearsed(told)
    else:
        click.echo(
            f"{told['moved']:,} tasks moved, {told['archived']:,} archived in {told['archived_bytes']:,} bytes, "
            f"{told['dropped']:,} days dropped"
        )
        for one in told["left"]:
            click.echo(
                f"{one['day']} is over and still there: {one['tasks']:,} tasks; the log says why", err=True
            )
    click.get_current_context().exit(1 if told.get("left") else 0)


def _rehearsed(told: Mapping[str, Any]) -> None:
    more = " or more" if told["more"] else ""
    click.echo(f"{told['ended']:,}{more} tasks ended long enough ago to be moved, unless a callback is owed")
    if told["retired"]:
        table(
            ("day", "part", "tasks", "archive"),
            (
                (str(one["day"]), str(one["part"]), f"{one['tasks']:,}", one["object"] or "none")
                for one in told["retired"]
            ),
        )
    else:
        click.echo("no day would be dropped")
