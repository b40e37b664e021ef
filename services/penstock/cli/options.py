"""Options that several verbs share, alone and in the combinations of their servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.deployment import data_dir_option
from penstock.cli.inputs import CALLBACK_FORMS
from penstock.cli.param_types import Whole
from penstock.core.task import Priority

Verb = TypeVar("Verb", bound=Callable[..., Any])

PRIORITY = click.Choice([priority.name for priority in Priority], case_sensitive=False)

# The number of lines that a list prints without --limit.
DEFAULT_LIMIT = 20

json_option = click.option(
    "--json", "json_", is_flag=True, help="Print JSON for programs, one document a line."
)
kafka_option = click.option(
    "--kafka", metavar="SERVERS", help="The bootstrap servers of Kafka. Default: $PENSTOCK_KAFKA."
)
postgres_option = click.option(
    "--postgres", metavar="URL", help="The address of the database. Default: $PENSTOCK_POSTGRES."
)
prefix_option = click.option(
    "--prefix", help="The prefix of topics and groups. Default: $PENSTOCK_PREFIX or penstock."
)


def together(*options: Callable[[Any], Any]) -> Callable[[Verb], Verb]:
    """Adds several options to a verb, in the order of its help."""

    def add(verb: Verb) -> Verb:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return add


# The servers of a verb that uses no gateway.
postgres_options = together(postgres_option, data_dir_option, json_option)
kafka_options = together(kafka_option, prefix_option, data_dir_option, json_option)
platform_options = together(kafka_option, postgres_option, prefix_option, data_dir_option, json_option)


def label_option(text: str) -> Callable[[Verb], Verb]:
    """The option --label, with its help."""
    return click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help=text)


def callback_option(text: str) -> Callable[[Verb], Verb]:
    """The option --callback, with the beginning of its help."""
    return click.option(
        "--callback",
        "callbacks",
        multiple=True,
        metavar="URL|JSON|@FILE",
        help=f"{text} {CALLBACK_FORMS}",
    )


def limit_option(noun: str) -> Callable[[Verb], Verb]:
    """The option --limit of a list of `noun`, a plural."""
    return click.option(
        "--limit",
        type=Whole(1),
        default=DEFAULT_LIMIT,
        show_default=True,
        help=f"The most {noun} to list.",
    )


def all_option(noun: str) -> Callable[[Verb], Verb]:
    """The option --all, which lifts the limit of a list of `noun`."""
    return click.option("--all", "all_", is_flag=True, help=f"List all {noun}, without a limit.")
