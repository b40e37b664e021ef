"""What a producer says of callbacks: whom to call, at which transitions, with which headers, in which form.

A URL alone stands for a subscription that leaves the rest at its default; most are that, and stay plain strings all the
way. Values of headers are secrets: they are in no repr, and `shown` is what answers and logs may have.

It needs no schema and no driver, so that whoever only reads rows need not load either.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import orjson

from penstock.contracts.cloudevent import CONTENT_TYPE
from penstock.contracts.event import FINAL_EVENTS, MASK
from penstock.errors import InvalidRecord

MOST_HEADERS = 20
# Names and values of all headers together: they go into every record of every callback.
HEADERS_BYTES = 4096

# A field name (RFC 9110, section 5.1).
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Anything else could end the header and begin another.
_NOT_IN_VALUES = re.compile(r"[^\x20-\x7e]")
# What the call itself says: of its framing, its body, its sender and its signature.
_RESERVED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    }
)
_RESERVED_PREFIX = "webhook-"

# What no URL contains as it is: blanks of any script, and control characters.
_NOT_IN_URLS = re.compile(r"[\s\x00-\x20\x7f-\x9f]")
# A name as resolvers take it: labels of 1 to 63 letters, digits, hyphens and (seen in private networks) underscores.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_LONGEST_HOST_NAME = 253


class Format(StrEnum):
    """What the body of a callback is."""

    EVENT = "event"
    CLOUDEVENTS = "cloudevents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """One target of a task, or of a type for the tasks that name none.

    Attributes:
        url: the target.
        events: "final", "all", or names of events; None is what the task's own `events` says.
        headers: sent with each call beside the standard ones; the values are secrets.
        format: of the body.
        ordered: its callbacks of one task are delivered in the order of their events.
    """

    url: str
    events: str | tuple[str, ...] | None = None
    # Never in a repr: tasks end up in logs and tracebacks.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    format: Format = Format.EVENT
    ordered: bool = False

    def wants(self, event: str, asked: str) -> bool:
        """Whether an event is to be told to this target.

        Args:
            event: its name, such as `task.succeeded`.
            asked: the task's `events`.
        """
        events = asked if self.events is None else self.events
        return events == "all" or event in (FINAL_EVENTS if events == "final" else events)

    def sent_headers(self) -> dict[str, str] | None:
        """What a call says beside the standard headers or instead of them; None when there is nothing."""
        headers = dict(self.headers)
        if self.format is Format.CLOUDEVENTS:
            headers["content-type"] = CONTENT_TYPE
        return headers or None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object; what is left at its default is left out."""
        wire: dict[str, Any] = {"url": self.url}
        if self.events is not None:
            wire["events"] = self.events if isinstance(self.events, str) else list(self.events)
        if self.headers:
            wire["headers"] = dict(self.headers)
        if self.format is not Format.EVENT:
            wire["format"] = self.format.value
        if self.ordered:
            wire["ordered"] = True
        return wire


# An entry of `callbacks`: a URL alone, or with what else was said of it.
Entry: TypeAlias = str | Subscription


def read(entries: Iterable[Any], pointer: str = "/callbacks") -> tuple[Entry, ...]:
    """Reads entries that their schema has let through.

    Raises:
        InvalidRecord: a URL that can never be called, or a header that must not be sent; never quotes its value.
    """
    return tuple(read_one(entry, f"{pointer}/{index}") for index, entry in enumerate(entries))


def read_one(raw: Any, pointer: str) -> Entry:
    """Reads one entry, as `read` does; `pointer` is where it stands."""
    if isinstance(raw, str):
        _check_url(raw, pointer)
        return raw
    _check_url(raw["url"], f"{pointer}/url")
    _check_headers(raw.get("headers") or {}, f"{pointer}/headers")
    return _entry(raw)


def to_wire(entries: Iterable[Entry]) -> list[str | dict[str, Any]]:
    """The entries as they were given, secrets and all."""
    return [entry if isinstance(entry, str) else entry.to_wire() for entry in entries]


def shown(entries: Iterable[Entry]) -> list[str | dict[str, Any]]:
    """The entries as answers show them."""
    wire = to_wire(entries)
    for entry in wire:
        if isinstance(entry, dict) and "headers" in entry:
            entry["headers"] = dict.fromkeys(entry["headers"], MASK)
    return wire


def to_columns(entries: Iterable[Entry]) -> list[str]:
    """The entries as `text[]` holds them: URLs, and objects as JSON text, which no URL can be taken for."""
    return [entry if isinstance(entry, str) else orjson.dumps(entry).decode() for entry in to_wire(entries)]


def from_columns(column: Sequence[str] | None) -> tuple[Entry, ...]:
    """What `to_columns` wrote; nothing for NULL."""
    return tuple(_entry(orjson.loads(text)) if text.startswith("{") else text for text in column or ())


def of(entry: Entry) -> Subscription:
    """The entry with its defaults."""
    return Subscription(url=entry) if isinstance(entry, str) else entry


def _entry(raw: Mapping[str, Any]) -> Entry:
    events = raw.get("events")
    found = Subscription(
        url=raw["url"],
        events=tuple(events) if isinstance(events, list) else events,
        headers=raw.get("headers") or {},
        format=Format(raw.get("format", Format.EVENT)),
        ordered=raw.get("ordered", False),
    )
    # One way to say it, which is also the cheaper one.
    return found.url if found == Subscription(url=found.url) else found


def _check_headers(headers: Mapping[str, str], pointer: str) -> None:
    """Refuses what must not or cannot be sent, without quoting values.

    Raises:
        InvalidRecord: pointing at the header.
    """
    seen: set[str] = set()
    for name, value in headers.items():
        at = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        folded = name.lower()
        if not _TOKEN.fullmatch(name):
            raise InvalidRecord(
                "the name of a header is letters, digits and any of !#$%&'*+-.^_`|~", pointer=at
            )
        if folded in _RESERVED or folded.startswith(_RESERVED_PREFIX):
            raise InvalidRecord(f"{name} is Penstock's own to send: choose another name", pointer=at)
        if folded in seen:
            raise InvalidRecord(
                f"{name} is given twice: names are the same in upper and lower case", pointer=at
            )
        seen.add(folded)
        if found := _NOT_IN_VALUES.search(value):
            raise InvalidRecord(
                f"character {found.start() + 1} of the value is not printable ASCII: line ends, control "
                "characters and other scripts are not sent",
                pointer=at,
            )
        if value == MASK:
            raise InvalidRecord(
                f"{MASK} is what answers show in place of a secret: give the value", pointer=at
            )
    size = sum(len(name) + len(value) for name, value in headers.items())
    if size > HEADERS_BYTES:
        raise InvalidRecord(
            f"names and values have {size:,} bytes together; {HEADERS_BYTES:,} is the limit", pointer=pointer
        )


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
