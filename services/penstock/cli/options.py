"""Options that several verbs share, alone and in the combinations of their servers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

import click

from penstock.cli.deployment import data_dir_option
from penstock.cli.inputs import CALLBACK_FORMS, callbacks_of, labels_of
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
by_option = click.option("--by", help="The name of the operator, for the audit. Default: user@host.")


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
    """The option --label, with its help; the verb gets the labels by name."""
    return click.option(
        "--label",
        "labels",
        multiple=True,
        metavar="NAME=VALUE",
        help=text,
        callback=lambda _ctx, _option, pairs: labels_of(pairs),
    )


def callback_option(text: str) -> Callable[[Verb], Verb]:
    """The option --callback, with the beginning of its help; the verb gets wire values, or None."""
    return click.option(
        "--callback",
        "callbacks",
        multiple=True,
        metavar="URL|JSON|@FILE",
        help=f"{text} {CALLBACK_FORMS}",
        callback=lambda _ctx, _option, texts: callbacks_of(texts),
    )


def limit_option(noun: str, default: int = DEFAULT_LIMIT) -> Callable[[Verb], Verb]:
    """The option --limit of a list of `noun`, a plural."""
    return click.option(
        "--limit",
        type=Whole(1),
        default=default,
        show_default=True,
        help=f"The most {noun} to list.",
    )


def list_options(noun: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options --limit and --all; the verb gets `limit`, which is None with --all."""

    def add(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        def run(*arguments: Any, limit: int, all_: bool, **options: Any) -> Any:
            return verb(*arguments, limit=None if all_ else limit, **options)

        every = click.option("--all", "all_", is_flag=True, help=f"List all {noun}, without a limit.")
        return limit_option(noun)(every(run))

    return add


def states_option(name: str, states: type[Enum], text: str) -> Callable[[Verb], Verb]:
    """A repeatable option that names states; the verb gets them by the plural of the name."""
    plural = name.removeprefix("--") + ("es" if name.endswith("s") else "s")
    return click.option(
        name, plural, multiple=True, type=click.Choice([state.value for state in states]), help=text
    )


def events_option(text: str) -> Callable[[Verb], Verb]:
    """The option --events, with its help."""
    return click.option("--events", type=click.Choice(["final", "all"]), help=text)


def rate_option(text: str) -> Callable[[Verb], Verb]:
    """The option --rate of a verb that changes many, with its help."""
    return click.option("--rate", type=click.FloatRange(min=0.001, max=1_000_000), help=text)
