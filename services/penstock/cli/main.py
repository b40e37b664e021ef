"""The command with all its verbs; turns errors into messages and exit statuses."""

from __future__ import annotations

import os
from typing import IO, Any

import click

import penstock
from penstock.cli import (
    api_keys,
    binding,
    callbacks,
    database,
    history,
    operations,
    rejected,
    serving,
    targets,
    tasks,
    topics,
    types,
)
from penstock.errors import (
    GatewayUnavailable,
    NotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
    UnknownType,
)
from penstock.http.problems import Faults
from penstock.logs import quiet_libraries
from penstock.process import exit_status
from penstock.variables import misspelt

_INTERRUPTED = 130

# The most faults of one request that are printed.
_MAX_FAULTS = 20


class Failure(click.ClickException):
    """An error of Penstock as click prints it."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error
        self.exit_code = exit_status(error)

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the error and what to do next."""
        faults = self.error.faults[:_MAX_FAULTS] if isinstance(self.error, Faults) else [self.error]
        for fault in faults:
            click.echo(f"penstock: {fault}", file=file, err=file is None)
        if isinstance(self.error, Faults) and len(self.error.faults) > _MAX_FAULTS:
            click.echo(f"  … and {len(self.error.faults) - _MAX_FAULTS} more", file=file, err=file is None)
        for hint in getattr(self.error, "__notes__", None) or _hints(self.error):
            click.echo(f"  {hint}", file=file, err=file is None)


_TYPES_HINT = "`penstock types` lists the types, and `penstock types add NAME` registers one"

# The next step after a `NotFound`, by the beginning of its message. The gateway and the database
# write the messages, and neither knows the command line.
_NOT_FOUND_HINTS = {
    "there is no task type ": _TYPES_HINT,
    "there is no task ": "`penstock list` lists the newest tasks with their ids",
    "there is no operation ": "`penstock audit` lists the operations with their ids",
    "there is no key ": "`penstock keys list` lists the API keys with their ids",
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
    if isinstance(error, UnknownType):
        return (_TYPES_HINT,)
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


class _Verbs(click.Group):
    """A group that turns errors of Penstock into exit statuses, also under click's test runner."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            raise Failure(error) from error
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(penstock.__version__, prog_name="penstock")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Asynchronous, multi-stage tasks on Kafka and PostgreSQL."""
    quiet_libraries()
    # A service logs them.
    if ctx.invoked_subcommand != serving.run.name:
        for variable, nearest in misspelt(os.environ).items():
            click.echo(f"penstock: {variable} is not read: did you mean {nearest}?", err=True)


for verb in (
    serving.up,
    serving.run,
    tasks.submit,
    tasks.get,
    tasks.list_,
    tasks.cancel,
    tasks.watch,
    operations.tasks,
    operations.audit,
    types.types,
    targets.targets,
    callbacks.callbacks,
    history.history,
    api_keys.keys,
    serving.check,
    database.migrate,
    database.roles,
    topics.topics,
):
    cli.add_command(verb)


topics.topics.add_command(binding.bind)
topics.topics.add_command(rejected.replay_rejected)


def _summarize(group: click.Group) -> None:
    """Gives each verb a summary: the beginning of its help text, up to a stop or semicolon.

    Click would cut the first sentence anywhere.
    """
    for verb in group.commands.values():
        sentence = " ".join((verb.help or "").partition("\n\n")[0].split())
        verb.short_help = verb.short_help or sentence.partition(";")[0].removesuffix(".")
        if isinstance(verb, click.Group):
            _summarize(verb)


_summarize(cli)


def main() -> None:
    """The entry point of the command `penstock`."""
    cli(prog_name="penstock")
