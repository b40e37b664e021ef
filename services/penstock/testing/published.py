"""The events and callbacks that services would publish, in the order of their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.contracts.event import OutboxEntry


@dataclass(frozen=True, slots=True)
class SentCallback:
    """A callback that a target would receive; a pipeline calls nothing.

    Attributes:
        url: of the target.
        event: the body.
        headers: in addition to the standard ones; the values may be secrets.
    """

    url: str
    event: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Published:
    """Events and callbacks.

    Attributes:
        events: records of the topic `events`.
        callbacks: callbacks.
    """

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.callbacks: list[SentCallback] = []

    def add(self, entry: OutboxEntry) -> None:
        """Adds an entry of the outbox."""
        self.events += map(orjson.loads, entry.events)
        self.callbacks += [
            SentCallback(each.target.url, orjson.loads(each.body), each.headers or {})
            for each in entry.callbacks
        ]
