"""Finding the gateway, and options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from penstock.cli.deployment import data_dir_option, environment
from penstock.client import SyncClient
from penstock.errors import InvalidRecord

# Long enough for a gateway that is being restarted, short enough for a person.
PATIENCE_S = 3.0

_gateway_option = click.option(
    "--gateway",
    metavar="URL",
    help="Address of the gateway. Default: that of --data-dir, else $PENSTOCK_GATEWAY, else the deployment that "
    "`penstock up` runs in this directory, else http://127.0.0.1:8420.",
)


def gateway_option(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The two ways to name a gateway: by its address, and by the data directory of its deployment."""
    return _gateway_option(data_dir_option(verb))


def client(url: str | None) -> SyncClient:
    """A client of the gateway that is meant.

    Raises:
        SettingsError: a data directory was named in which no deployment runs, or the address is no URL.
    """
    return SyncClient(url or environment().get("PENSTOCK_GATEWAY"), patience_s=PATIENCE_S)


def labels_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """`name=value` options as a dictionary.

    Raises:
        InvalidRecord: one has no `=`.
    """
    labels = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRecord(f"--label takes name=value, not {pair!r}")
        labels[name] = value
    return labels


def without_nothing(**given: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in given.items() if value not in (None, (), {})}
