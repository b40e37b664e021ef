"""The command with all its verbs; `failures` prints their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

import penstock
from penstock.cli import streams
from penstock.cli.failures import is_expected, report
from penstock.cli.groups import LazyGroup, LazyVerb
from penstock.logs import quiet_libraries
from penstock.variables import misspelt

_INTERRUPTED = 130


class _Verbs(LazyGroup):
    """A group that turns all errors into exit statuses, also under click's test runner."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Runs the command line, and ends the process.

        Raises:
            SystemExit: always, with the exit status.
        """
        json_ = "--json" in (sys.argv[1:] if args is None else args)
        streams.prepare(json_=json_)
        try:
            try:
                status = super().main(args, *more, **{**extra, "standalone_mode": False})
            finally:
                sys.stdout.flush()
        except Exception as error:
            if sys.flags.dev_mode and not is_expected(error):
                raise
            status = report(error, json_=json_)
            if isinstance(error, OSError):
                streams.discard()
        sys.exit(status or 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


def _verb(module: str, attribute: str, summary: str) -> LazyVerb:
    return LazyVerb(f"penstock.cli.{module}", attribute, summary)


_VERBS = {
    "up": _verb("local", "up", "Runs a whole deployment on this machine until Ctrl-C"),
    "down": _verb("local", "down", "Stops the deployment of a directory, as Ctrl-C does"),
    "status": _verb("local", "status", "Shows the deployment of a directory"),
    "worker": _verb("worker", "worker", "Runs the worker NAME of a Python module until SIGTERM or Ctrl-C"),
    "run": _verb("serving", "run", "Runs one service in this process until SIGTERM"),
    "submit": _verb("tasks", "submit", "Submits one task, or with --file many tasks"),
    "get": _verb("tasks", "get", "Shows one task with its context, result, stages and callbacks"),
    "list": _verb("tasks", "list_", "Lists tasks, newest first"),
    "logs": _verb("logs", "logs", "Prints what the handlers of a task have logged, attempt after attempt"),
    "cancel": _verb("tasks", "cancel", "Cancels the tasks that have not ended"),
    "watch": _verb("tasks", "watch", "Watches tasks until all have ended"),
    "tasks": _verb(
        "operations",
        "tasks",
        "Cancels, pauses, resumes, re-prioritises, recovers or reruns tasks, by id or by filter",
    ),
    "audit": _verb(
        "operations", "audit", "Lists the operations of `penstock tasks` and `penstock flows`, latest first"
    ),
    "types": _verb("types", "types", "Lists, shows, registers, changes, pauses and resumes task types"),
    "completion": _verb(
        "completion",
        "completion",
        "Prints the completion of a shell: verbs, options, task types, flows, schedules and targets",
    ),
    "workers": _verb(
        "workers",
        "workers",
        "Lists the workers of each type: stages, slots, attempts in flight, last sign of life",
    ),
    "targets": _verb("targets", "targets", "Lists targets of callbacks with health and backlog"),
    "callbacks": _verb("callbacks", "callbacks", "Lists callbacks, and replays dead ones"),
    "history": _verb(
        "history",
        "history",
        "Lists the days of history, and does now what task-sync does with history every minute",
    ),
    "flows": _verb("flows", "flows", "Uploads, starts, shows and steers flows"),
    "schedules": _verb("schedules", "schedules", "Starts flows by cron, in a time zone"),
    "keys": _verb("api_keys", "keys", "Creates, lists, rotates and revokes API keys, directly in PostgreSQL"),
    "check": _verb("serving", "check", "Proves that no task or callback is in limbo"),
    "migrate": _verb("database", "migrate", "Applies the migrations that the database lacks"),
    "roles": _verb(
        "database",
        "roles",
        "Manages a PostgreSQL role for each service, with exactly the rights that it needs",
    ),
    "rejected": _verb("rejected", "rejected", "Lists records that were rejected, and submits them again"),
    "topics": _verb("topics", "topics", "Creates the platform's topics that do not exist"),
}


@click.group(cls=_Verbs, verbs=_VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(penstock.__version__, prog_name="penstock")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Asynchronous, multi-stage tasks on Kafka and PostgreSQL."""
    quiet_libraries()
    # A service logs them.
    if ctx.invoked_subcommand != "run":
        for variable, nearest in misspelt(os.environ).items():
            click.echo(f"penstock: {variable} is not read: did you mean {nearest}?", err=True)


def main() -> None:
    """The entry point of the command `penstock`."""
    cli(prog_name="penstock")
