"""Arguments and options that name something of the deployment, which a shell can complete.

The names come from the gateway, within a second. Without an answer nothing is completed, and
nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import click
from click.shell_completion import CompletionItem

from penstock.cli.gateway import open_client
from penstock.client import SyncClient

# Seconds that a person waits for a completion.
ANSWER_S = 1.0
# A shell would print more than this on several screens.
MOST = 200


class Name(click.ParamType):
    """A text that names something.

    Args:
        find: all names, by a client; more than `MOST` are cut.
    """

    name = "text"

    def __init__(self, find: Callable[[SyncClient, str], Iterable[str]]) -> None:
        self._find = find

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 (click's signature)
        incomplete: str,
    ) -> list[CompletionItem]:
        """The names that begin with a text."""
        try:
            with (
                ctx.scope(cleanup=False),
                open_client(ctx.params.get("gateway"), patience_s=0, timeout_s=ANSWER_S) as client,
            ):
                found = (name for name in self._find(client, incomplete) if name.startswith(incomplete))
                return [CompletionItem(name) for name in islice(found, MOST)]
        except Exception:  # noqa: BLE001 (fails open, with no names: an error would be printed into the line that a person types)
            return []


TYPE_NAME = Name(lambda client, _begin: (each["name"] for each in client.types()))
FLOW_NAME = Name(lambda client, _begin: (each["name"] for each in client.flow_definitions()))
SCHEDULE_NAME = Name(lambda client, _begin: (each["name"] for each in client.schedules()))
TARGET_URL = Name(
    lambda client, begin: dict.fromkeys(
        each["url"] for each in client.targets(prefix=begin or None, limit=MOST)
    )
)
