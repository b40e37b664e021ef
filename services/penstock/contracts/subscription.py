"""The callbacks of a task: targets, the events at which they are called, headers and format.

A URL alone stands for a subscription with defaults. Most subscriptions are one, so they stay plain
strings throughout. Values of headers are secrets: no repr has them, and answers and logs have the
`masked` form.

This module needs neither a schema nor a driver, so reading rows loads neither.
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

MAX_HEADERS = 20
# The limit for names and values of all headers together, because every record of every callback has
# them.
MAX_HEADERS_BYTES = 4096

# A field name of HTTP (RFC 9110, section 5.1).
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Other characters could end the header and begin another.
_NOT_IN_HEADER_VALUES = re.compile(r"[^\x20-\x7e]")
# Headers that the call itself sets: framing, body, sender and signature.
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
# The indexes of PostgreSQL take entries of at most 2,704 bytes, with the namespace.
MAX_URL_BYTES = 2000

# Blanks of any script and control characters, which a URL has only in encoded form.
_NOT_IN_URLS = re.compile(r"[\s\x00-\x20\x7f-\x9f]")
# A label of a host name: 1 to 63 letters, digits, hyphens and underscores, which private networks
# use.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# Resolvers read these as numbers of an IPv4 address, in decimal, octal or hexadecimal.
_NUMBER = re.compile(r"(?:\d+|0[xX][\da-fA-F]*)(?:\.(?:\d+|0[xX][\da-fA-F]*))*\.?")
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_MAX_HOST_NAME_LENGTH = 253


class Format(StrEnum):
    """The format of a callback's body."""

    EVENT = "event"
    CLOUDEVENTS = "cloudevents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A target's subscription to the events of a task, or of a type's tasks without targets.

    Attributes:
        url: URL of the target.
        events: "final", "all", or names of events; None is the task's own `events`.
        headers: headers of each call in addition to the standard ones; the values are secrets.
        format: format of the body.
        ordered: callbacks of one task are delivered in the order of their events.
    """

    url: str
    events: str | tuple[str, ...] | None = None
    # Not in the repr: a task may appear in logs and tracebacks.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    format: Format = Format.EVENT
    ordered: bool = False

    def includes(self, event: str, task_events: str) -> bool:
        """Whether the target is called at an event.

        Args:
            event: name of the event, such as `task.succeeded`.
            task_events: the task's `events`, "final" or "all".
        """
        events = task_events if self.events is None else self.events
        return events == "all" or event in (FINAL_EVENTS if events == "final" else events)

    def request_headers(self) -> dict[str, str] | None:
        """Headers in addition to the standard ones, or instead of them; None without any."""
        headers = dict(self.headers)
        if self.format is Format.CLOUDEVENTS:
            headers["content-type"] = CONTENT_TYPE
        return headers or None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object, without the fields that have their default."""
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


# An entry of `callbacks`: a URL alone, or an object.
Entry: TypeAlias = str | Subscription


def read(entries: Iterable[Any], pointer: str = "/callbacks") -> tuple[Entry, ...]:
    """Reads entries that conform to their schema.

    Raises:
        InvalidRecord: a URL can never be called, or a header must not be sent. The text does not
            quote the value.
    """
    return tuple(read_one(entry, f"{pointer}/{index}") for index, entry in enumerate(entries))


def read_one(raw: Any, pointer: str) -> Entry:
    """Reads one entry as `read` does; `pointer` is its JSON Pointer."""
    if isinstance(raw, str):
        _check_url(raw, pointer)
        return raw
    _check_url(raw["url"], f"{pointer}/url")
    _check_headers(raw.get("headers") or {}, f"{pointer}/headers")
    return _entry(raw)


def to_wire(entries: Iterable[Entry]) -> list[str | dict[str, Any]]:
    """The entries as they were submitted, with their secrets."""
    return [entry if isinstance(entry, str) else entry.to_wire() for entry in entries]


def masked(entries: Iterable[Entry]) -> list[str | dict[str, Any]]:
    """The entries with the values of their headers masked, for answers and logs."""
    wire = to_wire(entries)
    for entry in wire:
        if isinstance(entry, dict) and "headers" in entry:
            entry["headers"] = dict.fromkeys(entry["headers"], MASK)
    return wire


def to_columns(entries: Iterable[Entry]) -> list[str]:
    """The entries for a column of `text[]`: URLs as they are, and objects as JSON text."""
    return [entry if isinstance(entry, str) else orjson.dumps(entry).decode() for entry in to_wire(entries)]


def from_columns(column: Sequence[str] | None) -> tuple[Entry, ...]:
    """The entries of a column that `to_columns` made; none for NULL."""
    return tuple(_entry(orjson.loads(text)) if text.startswith("{") else text for text in column or ())


def expand(entry: Entry) -> Subscription:
    """The entry as a subscription; a URL gets the defaults."""
    return Subscription(url=entry) if isinstance(entry, str) else entry


def _entry(raw: Mapping[str, Any]) -> Entry:
    events = raw.get("events")
    subscription = Subscription(
        url=raw["url"],
        events=tuple(events) if isinstance(events, list) else events,
        headers=raw.get("headers") or {},
        format=Format(raw.get("format", Format.EVENT)),
        ordered=raw.get("ordered", False),
    )
    # A subscription with defaults has one form only: its URL.
    return subscription.url if subscription == Subscription(url=subscription.url) else subscription


def _check_headers(headers: Mapping[str, str], pointer: str) -> None:
    """Requires headers that a call can and may send.

    Raises:
        InvalidRecord: a header cannot be sent; `pointer` is the header. The text does not quote the
            value.
    """
    names: set[str] = set()
    for name, value in headers.items():
        header_pointer = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        folded = name.lower()
        if not _TOKEN.fullmatch(name):
            raise InvalidRecord(
                "the name of a header has only letters, digits and !#$%&'*+-.^_`|~; change it",
                pointer=header_pointer,
            )
        if folded in _RESERVED or folded.startswith(_RESERVED_PREFIX):
            raise InvalidRecord(
                f"{name} is Penstock's own to send: choose another name", pointer=header_pointer
            )
        if folded in names:
            raise InvalidRecord(
                f"{name} is given twice, because names are the same in upper and lower case: remove one",
                pointer=header_pointer,
            )
        names.add(folded)
        if found := _NOT_IN_HEADER_VALUES.search(value):
            raise InvalidRecord(
                f"character {found.start() + 1} of the value is not printable ASCII: remove or encode it; line ends, "
                "control characters and other scripts are not sent",
                pointer=header_pointer,
            )
        if value == MASK:
            raise InvalidRecord(
                f"{MASK} is what answers show in place of a secret: give the value itself",
                pointer=header_pointer,
            )
    size = sum(len(name) + len(value) for name, value in headers.items())
    if size > MAX_HEADERS_BYTES:
        raise InvalidRecord(
            f"names and values have {size:,} bytes together; {MAX_HEADERS_BYTES:,} is the limit",
            pointer=pointer,
        )


def _check_url(url: str, pointer: str) -> None:
    """Requires a URL that can be called; another would be retried until its schedule ends.

    Raises:
        InvalidRecord: it is no http(s) URL with a host that can exist.
    """
    if (size := len(url.encode())) > MAX_URL_BYTES:
        raise InvalidRecord(
            f"the URL has {size:,} bytes; {MAX_URL_BYTES:,} is the limit: shorten it", pointer=pointer
        )
    # Check this before urlsplit, which silently removes some of these characters.
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
    # The name and the password may also be empty: "http://@host/".
    if "@" in parts.netloc:
        raise InvalidRecord(
            "a callback URL must not have a user name or password: send them in a header", pointer=pointer
        )
    if not _can_be_host(parts.hostname, bracketed="[" in parts.netloc):
        raise InvalidRecord(
            f"{parts.hostname!r} is neither a host name nor an IP address: correct the URL", pointer=pointer
        )
    if port == 0:
        raise InvalidRecord("port 0 cannot be called: choose another port", pointer=pointer)


def _can_be_host(name: str, *, bracketed: bool) -> bool:
    number = _NUMBER.fullmatch(name) is not None
    if bracketed or number:
        try:
            # Not 127.1, 2130706433 and 0x7f.1: aiohttp does not call them.
            (ipaddress.IPv4Address if number else ipaddress.IPv6Address)(name)
        except ValueError:
            return False
        return True
    try:
        ascii_name = name.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    return len(ascii_name) <= _MAX_HOST_NAME_LENGTH and _HOST_NAME.fullmatch(ascii_name.lower()) is not None
