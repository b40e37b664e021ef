"""The command with all its verbs; turns errors into messages and exit statuses."""

from __future__ import annotations

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
from penstock.errors import GatewayUnavailable, PenstockError, Unauthenticated, Unavailable, UnknownType
from penstock.http.problems import Faults
from penstock.logs import quiet_libraries
from penstock.process import exit_status

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


def _hints(error: PenstockError) -> tuple[str, ...]:
    if isinstance(error, GatewayUnavailable) and str(error).startswith("no gateway"):
        return (
            "start a deployment with `penstock up`; or name a running one by its directory (--data-dir or",
            "PENSTOCK_DATA_DIR) or by the address of its gateway (--gateway or PENSTOCK_GATEWAY)",
        )
    if isinstance(error, UnknownType):
        return ("`penstock types` lists the types, and `penstock types add NAME` registers one",)
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
def cli() -> None:
    """Asynchronous, multi-stage tasks on Kafka and PostgreSQL."""
    quiet_libraries()


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


def main() -> None:
    """The entry point of the command `penstock`."""
    cli(prog_name="penstock")
