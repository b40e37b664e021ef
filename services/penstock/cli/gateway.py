"""Finding the gateway, and options that several verbs share."""

from __future__ import annotations

from typing import Any

import click

from penstock.client import SyncClient
from penstock.errors import InvalidRecord

# Long enough for a gateway that is being restarted, short enough for a person.
PATIENCE_S = 3.0

gateway_option = click.option(
    "--gateway",
    envvar="PENSTOCK_GATEWAY",
    metavar="URL",
    help="Address of the gateway. Default: $PENSTOCK_GATEWAY, else the deployment that `penstock up` runs in this "
    "directory, else http://127.0.0.1:8420.",
)


def client(url: str | None) -> SyncClient:
    """A client of the gateway that is meant."""
    return SyncClient(url or local_environment().get("PENSTOCK_GATEWAY"), patience_s=PATIENCE_S)


def local_environment() -> dict[str, str]:
    """The settings of the deployment that `penstock up` runs in this directory; empty when none does."""
    try:
        from penstock.local.state import running  # noqa: PLC0415 (not on every system: see below)
    except ImportError:
        # Its lock needs fcntl, which Windows has not; neither has Windows a local deployment.
        return {}
    found = running()
    return found.environment() if found else {}


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
