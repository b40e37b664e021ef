"""A task as a producer submits it (`submitted.schema.json`): over HTTP, by the client or on the topic."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from penstock.contracts.context import Context
from penstock.contracts.validation import conform
from penstock.core.task import Priority
from penstock.errors import InvalidRecord, TooLarge

# A submitted context larger than this is refused: it does not fit a record of `submitted` together with its envelope.
# What handlers return has no such limit: it goes to the object store before anything is written to Kafka.
CONTEXT_LIMIT_BYTES = 900_000

# What no URL contains as it is: blanks of any script, and control characters.
_NOT_IN_URLS = re.compile(r"[\s\x00-\x20\x7f-\x9f]")
# A name as resolvers take it: labels of 1 to 63 letters, digits, hyphens and (seen in private networks) underscores.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_LONGEST_HOST_NAME = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A task to be.

    Attributes:
        type: name of a registered task type.
        stage: where to begin; None is the type's first stage.
        priority: which goes first within the type.
        context: what the first stage is given.
        idempotency_key: a second submission with the same type and key returns the first task.
        run_at: not to be released before.
        callbacks: URLs to be called at each subscribed transition.
        events: which transitions are reported, "final" or "all"; None is the type's choice.
        labels: free names and values, for finding tasks again.
    """

    type: str
    context: Context
    stage: str | None = None
    priority: Priority = Priority.MEDIUM
    idempotency_key: str | None = None
    run_at: datetime | None = None
    callbacks: tuple[str, ...] = ()
    events: str | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, raw: Any) -> Submission:
        """Validates and reads one submission.

        Raises:
            InvalidRecord: the document breaks the schema or contradicts itself; `pointer` tells where.
            TooLarge: the context is beyond what a record can carry.
        """
        conform(raw, "submitted")
        context = Context.from_wire(raw) or Context.encode(None)
        context.require_shallow()
        if context.size > CONTEXT_LIMIT_BYTES:
            raise TooLarge(
                f"the context has {context.size:,} bytes; {CONTEXT_LIMIT_BYTES:,} is the limit: "
                "put it where workers can fetch it and submit its URL",
                pointer="/context",
            )
        for index, url in enumerate(raw.get("callbacks") or ()):
            _check_url(url, f"/callbacks/{index}")
        return cls(
            type=raw["type"],
            stage=raw.get("stage"),
            priority=Priority[raw["priority"]] if raw.get("priority") else Priority.MEDIUM,
            context=context,
            idempotency_key=raw.get("idempotency_key"),
            run_at=_moment(raw["run_at"]) if raw.get("run_at") else None,
            callbacks=tuple(raw.get("callbacks") or ()),
            events=raw.get("events"),
            labels=dict(raw.get("labels") or {}),
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object a producer sends; what is left at its default is left out."""
        wire: dict[str, Any] = {"type": self.type, **self.context.to_wire()}
        if self.stage is not None:
            wire["stage"] = self.stage
        if self.priority is not Priority.MEDIUM:
            wire["priority"] = self.priority.name
        if self.idempotency_key is not None:
            wire["idempotency_key"] = self.idempotency_key
        if self.run_at is not None:
            wire["run_at"] = self.run_at.isoformat()
        if self.callbacks:
            wire["callbacks"] = list(self.callbacks)
        if self.events is not None:
            wire["events"] = self.events
        if self.labels:
            wire["labels"] = self.labels
        return wire


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        # The schema's date-time lets through what Python's calendar has not, such as leap seconds.
        raise InvalidRecord(f"not a moment we can keep: {error}", pointer="/run_at") from error


def _check_url(url: str, pointer: str) -> None:
    """Refuses what could never be called, which would else be tried until its schedule is exhausted.

    Raises:
        InvalidRecord: not an http(s) URL with a host that can exist.
    """
    # Before it is split, which drops some of them silently.
    if found := _NOT_IN_URLS.search(url):
        raise InvalidRecord(
            f"character {found.start() + 1} is {found.group()!r}: "
            "a URL has neither blanks nor control characters (write them as %20 and so on)",
            pointer=pointer,
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRecord(f"not a URL: {error}", pointer=pointer) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRecord("a callback must be an absolute http:// or https:// URL", pointer=pointer)
    # Also when they are empty: "http://@host/".
    if "@" in parts.netloc:
        raise InvalidRecord("a callback URL must not carry a user name or password", pointer=pointer)
    if not _can_be_host(parts.hostname, bracketed="[" in parts.netloc):
        raise InvalidRecord(f"{parts.hostname!r} is neither a host name nor an IP address", pointer=pointer)
    if port == 0:
        raise InvalidRecord("port 0 cannot be called", pointer=pointer)


def _can_be_host(name: str, *, bracketed: bool) -> bool:
    if bracketed:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            return False
        return True
    try:
        ascii_name = name.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    return len(ascii_name) <= _LONGEST_HOST_NAME and _HOST_NAME.fullmatch(ascii_name.lower()) is not None
