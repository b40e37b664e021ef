"""The command with all its verbs; turns errors into messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

import click
import orjson

import penstock
from penstock.cli.groups import LazyGroup, LazyVerb
from penstock.errors import (
    GatewayUnavailable,
    NotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
    UnknownFlow,
    UnknownType,
)
from penstock.http.problems import Faults
from penstock.logs import quiet_libraries
from penstock.variables import misspelt

_INTERRUPTED = 130

# The most faults of one request that are printed.
_MAX_FAULTS = 20


class Failure(click.ClickException):
    """An error of Penstock as click prints it.

    Args:
        error: the error.
        json_: print one JSON document: `error`, `exit_status`, `faults` and `next`, what to do.
    """

    def __init__(self, error: PenstockError, *, json_: bool = False) -> None:
        from penstock.process import exit_status  # noqa: PLC0415 (only an error needs the event loop's modules)

        super().__init__(str(error))
        self.error = error
        self.exit_code = exit_status(error)
        self._json = json_

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the error and what to do next."""
        faults = self.error.faults if isinstance(self.error, Faults) else [self.error]
        hints = getattr(self.error, "__notes__", None) or _hints(self.error)
        if self._json:
            _print_error(str(self.error), self.exit_code, list(map(str, faults)), list(hints))
            return
        for fault in faults[:_MAX_FAULTS]:
            click.echo(f"penstock: {fault}", file=file, err=file is None)
        if len(faults) > _MAX_FAULTS:
            click.echo(f"  … and {len(faults) - _MAX_FAULTS} more", file=file, err=file is None)
        for hint in hints:
            click.echo(f"  {hint}", file=file, err=file is None)


class _Misuse(click.UsageError):
    """A usage error as one JSON document."""

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 (click's signature)
        help_ = [f"{self.ctx.command_path} --help"] if self.ctx else []
        _print_error(self.format_message(), self.exit_code, [self.format_message()], help_)


def _print_error(error: str, exit_status: int, faults: list[str], hints: list[str]) -> None:
    """Prints one document about an error on standard error."""
    document = {"error": error, "exit_status": exit_status, "faults": faults, "next": hints}
    sys.stderr.write(orjson.dumps(document).decode() + "\n")


_TYPES_HINT = "`penstock types` lists the types, and `penstock types add NAME` registers one"

_FLOWS_HINT = (
    "`penstock flows definitions` lists the definitions, and `penstock flows upload FILE` uploads one"
)

# The next step after a `NotFound`, by the beginning of its message. The gateway and the database
# write the messages, and neither knows the command line.
_NOT_FOUND_HINTS = {
    "there is no task type ": _TYPES_HINT,
    "there is no task ": "`penstock list` lists the newest tasks with their ids",
    "there is no flow ": "`penstock flows list` lists the newest flows with their ids",
    "there is no schedule ": "`penstock schedules list` lists the schedules",
    "there is no backfill ": "`penstock schedules backfills` lists the backfills with their ids",
    "there is no operation ": "`penstock audit` lists the operations with their ids",
    "there is no key ": "`penstock keys list` lists the API keys with their ids",
    "there is no flow definition ": _FLOWS_HINT,
    "there is no target ": "`penstock targets` lists the targets",
    "there is no namespace ": "the namespace of a type is the part of its name before the first --: `penstock types` "
    "lists the types",
}


def _hints(error: PenstockError) -> tuple[str, ...]:
    if isinstance(error, NotFound):
        return tuple(
            hint for beginning, hint in _NOT_FOUND_HINTS.items() if str(error).startswith(beginning)
        )[:1]
    if isinstance(error, GatewayUnavailable) and str(error).startswith("no gateway"):
        return (
            "start a deployment with `penstock up`; or name a running one by its directory (--data-dir or",
            "PENSTOCK_DATA_DIR) or by the address of its gateway (--gateway or PENSTOCK_GATEWAY)",
        )
    if isinstance(error, UnknownType | UnknownFlow):
        return (_FLOWS_HINT if isinstance(error, UnknownFlow) else _TYPES_HINT,)
    if isinstance(error, Unauthenticated):
        return (
            "set PENSTOCK_API_KEY to an API key of this gateway, or PENSTOCK_API_KEY_FILE to a file with one;",
            "`penstock keys create` creates an API key",
        )
    if isinstance(error, Unavailable):
        return (
            "check that the server runs, and that PENSTOCK_KAFKA and PENSTOCK_POSTGRES name the right servers",
        )
    return ()


class _Verbs(LazyGroup):
    """A group that turns errors of Penstock into exit statuses, also under click's test runner."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # A usage error may come before the verb has read its options.
        ctx.obj = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if not ctx.obj:
                raise
            raise _Misuse(error.format_message(), error.ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            raise Failure(error, json_=ctx.obj) from error
        except click.UsageError as error:
            if not ctx.obj:
                raise
            raise _Misuse(error.format_message(), error.ctx) from error
        except click.Abort:
            if not ctx.obj:
                raise
            _print_error("aborted: the answer was no", 1, ["aborted: the answer was no"], [])
            ctx.exit(1)
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
    "get": _verb("tasks", "get", "Shows one task with its context, result, attempts and callbacks"),
    "list": _verb("tasks", "list_", "Lists tasks, newest first"),
    "logs": _verb("logs", "logs", "Prints what the handlers of a task have logged, attempt after attempt"),
    "cancel": _verb("tasks", "cancel", "Cancels the tasks that have not ended"),
    "watch": _verb("tasks", "watch", "Watches tasks until all have ended"),
    "tasks": _verb(
        "operations",
        "tasks",
        "Cancels, pauses, resumes, re-prioritises or recovers tasks, by id or by filter",
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
        "workers", "workers", "Lists the workers of each type, with their stages, slots and partitions"
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
