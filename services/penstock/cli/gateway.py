"""Finds the gateway; options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from penstock.cli.deployment import data_dir_option, gateway_address, given_data_dir
from penstock.cli.options import json_option, together
from penstock.cli.param_types import NO_LIMIT
from penstock.client import SyncClient

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


def without_empty(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value not in (None, (), {})}


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value, with None for `none`, which removes a limit."""
    return {name: None if value == NO_LIMIT else value for name, value in without_empty(**options).items()}
