"""Runs an operation on many tasks or flows, with its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from penstock.cli.output import progress
from penstock.client import Operated
from penstock.errors import PenstockError


def run_operation(name: str, operate: Callable[..., Operated], options: Mapping[str, Any]) -> Operated:
    """The outcome of an operation.

    Args:
        name: of its verb, for people.
        operate: the method of the client, with the verb and the filter.
        options: `json_`, `dry_run`, `rate` and `by` of the command.

    Raises:
        PenstockError, KeyboardInterrupt: the operation goes on, and the user reads how to stop it.
    """
    operation_ids: list[str] = []
    with progress(quiet=options["json_"] or options["dry_run"]) as bar:
        task = bar.add_task(name, total=None)
        try:
            return operate(
                rate=options["rate"],
                by=options["by"],
                dry_run=options["dry_run"],
                progress=lambda count: bar.advance(task, count),
                begun=operation_ids.append,
            )
        except (KeyboardInterrupt, PenstockError):
            for operation_id in operation_ids:
                click.echo(
                    f"operation {operation_id} continues; `penstock tasks stop {operation_id}` stops it",
                    err=True,
                )
            raise
