"""Finds the gateway; options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from penstock.cli.deployment import data_dir_option, gateway_address, given_data_dir
from penstock.cli.options import json_option, together
from penstock.client import SyncClient
from penstock.errors import InvalidRecord

# How long a verb waits for a gateway, in seconds: long enough for a restart, and short enough for a
# person.
PATIENCE_S = 3.0
# Longest time of one request, in seconds.
TIMEOUT_S = 60.0

# The options that name a gateway: its address, or the data directory of its deployment.
gateway_option = together(
    click.option(
        "--gateway",
        metavar="URL",
        help="The address of the gateway. Default: the deployment of --data-dir, or else $PENSTOCK_GATEWAY, or else the "
        "deployment that `penstock up` runs in this directory.",
    ),
    data_dir_option,
)


def client_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a verb that uses one client, which it gets as `client`, and prints JSON."""

    @wraps(verb)
    def run(*arguments: Any, gateway: str | None, **options: Any) -> Any:
        with open_client(gateway) as client:
            return verb(*arguments, client=client, **options)

    return gateway_option(json_option(run))


def open_client(
    url: str | None, *, patience_s: float | None = None, timeout_s: float = TIMEOUT_S
) -> SyncClient:
    """A client of the gateway that the options name.

    Args:
        url: of the option.
        patience_s: seconds for which a request is repeated; None is `PATIENCE_S`.
        timeout_s: seconds of one request.

    Raises:
        SettingsError: no deployment runs in the data directory, or the address is no URL.
    """
    return SyncClient(
        url or gateway_address(),
        patience_s=PATIENCE_S if patience_s is None else patience_s,
        timeout_s=timeout_s,
        data_dir=given_data_dir(),
    )


def labels_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """The labels of `name=value` options.

    Raises:
        InvalidRecord: an option has no `=`, or no name.
    """
    labels = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRecord(f"--label {pair!r} has no name and value: write --label name=value")
        labels[name] = value
    return labels


def without_empty(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value not in (None, (), {})}
