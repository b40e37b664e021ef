"""Confirms verbs that change or delete all that matches a filter; names the number of matches."""

from __future__ import annotations

import sys

import click

yes_option = click.option(
    "--yes", is_flag=True, help="Do it without asking. Required without a terminal, as in a script."
)


def is_interactive() -> bool:
    """Whether a person at a terminal can answer."""
    return sys.stdin.isatty()


def confirm(consequence: str) -> None:
    """Asks whether to go on.

    Args:
        consequence: what would happen, such as `20,001 tasks would be cancelled`.

    Raises:
        UsageError: standard input is no terminal.
        Abort: the answer is no.
    """
    if not is_interactive():
        raise click.UsageError(
            f"{consequence}: look at them with --dry-run, and repeat the command with --yes to do it"
        )
    click.confirm(f"{consequence}. Go on?", abort=True, err=True)
