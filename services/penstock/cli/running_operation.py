"""Runs an operation on many tasks or flows: asks first, shows its progress and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from penstock.cli.confirmation import confirm
from penstock.cli.gateway import open_client
from penstock.cli.output import counted, counts_text, print_document, progress
from penstock.client import FlowFilter, Operated, SyncClient, TaskFilter
from penstock.core.flow.operations import FlowVerb
from penstock.core.operations import Verb
from penstock.core.task import State
from penstock.errors import NotFound, PenstockError

Filter = TypeVar("Filter", TaskFilter, FlowFilter)


def filter_of(kind: type[Filter], options: Mapping[str, Any], **named: Any) -> Filter:
    """The filter of the options that have the names of its fields, and of others by name."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in options]
    given = {name: options[name] for name in names}
    return kind(**{**given, **named})


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a command.

    Attributes:
        verb: what it does.
        participle: of the verb.
        outcome: what has happened to what it changes.
        noun: what it changes, in the singular.
        operate: calls the method of a client with the verb, the filter and the given options.
        example: describes one task or flow of a dry run.
        not_found: the error when nothing matches.
    """

    verb: Verb | FlowVerb
    participle: str
    outcome: str
    noun: str
    operate: Callable[..., Operated]
    example: Callable[[Mapping[str, Any]], str]
    not_found: str

    def run(self, options: Mapping[str, Any]) -> None:
        """Runs it and prints the outcome.

        Args:
            options: `ids`, `yes`, `gateway`, `json_`, `dry_run`, `rate` and `by` of the command.

        Raises:
            NotFound: nothing matches.
            PenstockError, KeyboardInterrupt: it failed, or goes on; the user reads how to stop it.
        """
        if not (options["dry_run"] or options["yes"] or options["ids"]):
            with open_client(options["gateway"]) as client:
                preview = self.operate(client, dry_run=True)
            if not preview.count:
                raise NotFound(self.not_found)
            confirm(self._preview_text(preview))
        with open_client(options["gateway"]) as client:
            outcome = self._outcome(client, options)
        if options["json_"]:
            print_document({"dry_run": options["dry_run"], "verb": self.verb, **dataclasses.asdict(outcome)})
        else:
            self._print(outcome)
        if outcome.error is not None:
            raise PenstockError(f"operation {outcome.id} failed: {outcome.error}")
        if not outcome.count:
            raise NotFound(self.not_found)

    def _outcome(self, client: SyncClient, options: Mapping[str, Any]) -> Operated:
        operation_ids: list[str] = []
        with progress(quiet=options["json_"] or options["dry_run"]) as bar:
            task = bar.add_task(str(self.verb), total=None)
            try:
                return self.operate(
                    client,
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

    def _preview_text(self, outcome: Operated) -> str:
        count = f"{'' if outcome.complete else 'at least '}{counted(outcome.count, self.noun)}"
        states = f" ({counts_text(outcome.found_in)})" if outcome.count else ""
        return f"{count} would be {self.participle}{states}"

    def _print(self, outcome: Operated) -> None:
        if outcome.id is None:
            click.echo(self._preview_text(outcome))
            for found in outcome.examples:
                click.echo(f"  {self.example(found)}")
            return
        suffix = "" if outcome.state == "done" else f"; the operation is {outcome.state}"
        states = f" (before: {counts_text(outcome.found_in)})" if outcome.count else ""
        click.echo(
            f"{counted(outcome.count, self.noun)} {self.outcome}{states}, operation {outcome.id}{suffix}"
        )
        if self.verb is Verb.PAUSE and outcome.found_in.get(State.RUNNING):
            click.echo("  a running task is paused when its stage ends")
