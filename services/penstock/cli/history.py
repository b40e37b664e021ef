"""The verbs `penstock history`. History keeps ended tasks in one partition a day."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.deployment import deployment_settings
from penstock.cli.gateway import without_empty
from penstock.cli.groups import Group
from penstock.cli.options import limit_option, postgres_options
from penstock.cli.output import counted, print_document, print_list, table
from penstock.cli.param_types import Finite
from penstock.cli.serving import extra
from penstock.settings import Platform


@click.group(cls=Group)
def history() -> None:
    """Lists the days of history, and does now what task-sync does with history every minute."""


@history.command("list")
@limit_option("days", default=100)
@click.option("--all", "all_", is_flag=True, help="List dropped days too, with the place of their archive.")
@postgres_options
def list_(limit: int, *, all_: bool, json_: bool, **options: Any) -> None:
    """Lists the days of history, latest first, with the number of their tasks and their state."""
    with extra("services", "history"):
        from penstock.postgres import history as statements  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import open_pool  # noqa: PLC0415 (optional packages)

    async def fetch(settings: Platform) -> list[dict[str, Any]]:
        async with open_pool(
            settings.postgres, "history", pooled=settings.pooled, writing=False, size=1
        ) as pool:
            return [_document(row) for row in await statements.parts(pool, dropped=all_, limit=limit)]

    with deployment_settings(Platform, options, "postgres") as settings:
        days = asyncio.run(fetch(settings))
    print_list(
        days,
        ("day", "part", "tasks", "flows", "state", "bytes", "archive"),
        lambda day: (
            str(day["day"]),
            str(day["part"]),
            f"{day['tasks']:,}",
            f"{day['flows']:,}",
            day["state"],
            "" if day["bytes"] is None else f"{day['bytes']:,}",
            day["object"] or "",
        ),
        "history is empty: tasks move there PENSTOCK_HISTORY_KEEP_DAYS days after they have ended",
        json_=json_,
    )


def _document(row: Any) -> dict[str, Any]:
    columns = {name: row[name] for name in ("day", "part", "tasks", "flows", "object", "bytes", "sha256")}
    moments = {name: row[name] for name in ("opened_at", "sealed_at", "archived_at", "dropped_at")}
    state = next(
        (word for word in ("dropped", "archived", "sealed") if row[f"{word}_at"]),
        "open",
    )
    return {**columns, "state": state, **moments}


@history.command("run")
@click.option("--dry-run", is_flag=True, help="Show what the command would do, but change nothing.")
@click.option(
    "--keep-days",
    type=Finite(),
    metavar="DAYS",
    help="Move tasks that ended more days ago. Default: $PENSTOCK_HISTORY_KEEP_DAYS or 7.",
)
@click.option(
    "--retain-days",
    type=Finite(),
    metavar="DAYS",
    help="Archive and drop days that ended more days ago. Default: $PENSTOCK_HISTORY_RETAIN_DAYS or 90.",
)
@click.option(
    "--objects", metavar="URL", help="The object store for the archive. Default: $PENSTOCK_OBJECTS."
)
@postgres_options
def run(
    *, dry_run: bool, keep_days: float | None, retain_days: float | None, json_: bool, **options: Any
) -> None:
    """Does what task-sync does every minute: moves ended tasks to history, and drops old days.

    The status is 3 while another process does it, and 1 if an old day could not be archived.
    """
    with extra("services", "history"):
        from penstock.objects import ObjectStore  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import open_pool  # noqa: PLC0415 (optional packages)
        from penstock.task_sync.history import History  # noqa: PLC0415 (optional packages)
        from penstock.task_sync.history import dry_run as history_dry_run  # noqa: PLC0415 (optional packages)
        from penstock.task_sync.settings import TaskSyncSettings  # noqa: PLC0415 (optional packages)
    overrides = without_empty(history_keep_days=keep_days, history_retain_days=retain_days, **options)

    async def plan(settings: TaskSyncSettings) -> dict[str, Any]:
        async with open_pool(settings.postgres, "history", pooled=settings.pooled, size=1) as pool:
            return await history_dry_run(settings, pool)

    async def work(settings: TaskSyncSettings) -> dict[str, Any]:
        mover = History(settings, ObjectStore(settings.objects))
        while await mover.round():
            pass
        # One round more, because the last tasks may have moved to a day that is to be dropped.
        await mover.round()
        remaining = await plan(settings)
        return {
            "moved": mover.moved,
            "moved_flows": mover.moved_flows,
            "archived": mover.archived,
            "archived_bytes": mover.archived_bytes,
            "dropped": mover.dropped,
            "left": remaining["retired"],
        }

    with deployment_settings(TaskSyncSettings, overrides, "postgres", "objects") as settings:
        outcome = asyncio.run(plan(settings) if dry_run else work(settings))
    if json_:
        print_document({"dry_run": dry_run, **outcome})
    elif dry_run:
        _print_dry_run(outcome)
    else:
        click.echo(
            f"{counted(outcome['moved'], 'task')} and {counted(outcome['moved_flows'], 'flow')} moved, {outcome['archived']:,} archived in {outcome['archived_bytes']:,} bytes, "
            f"{counted(outcome['dropped'], 'day')} dropped"
        )
        for day in outcome["left"]:
            click.echo(
                f"{day['day']} with {counted(day['tasks'], 'task')} was not dropped; the log says why",
                err=True,
            )
    click.get_current_context().exit(1 if outcome.get("left") else 0)


def _print_dry_run(plan: Mapping[str, Any]) -> None:
    more = " or more" if plan["more"] else ""
    click.echo(
        f"{plan['ended']:,}{more} tasks would be moved, if all their callbacks have ended, and their flows have moved"
    )
    if plan["retired"]:
        table(
            ("day", "part", "tasks", "archive"),
            (
                (str(day["day"]), str(day["part"]), f"{day['tasks']:,}", day["object"] or "none")
                for day in plan["retired"]
            ),
        )
    else:
        click.echo("no day would be dropped")
