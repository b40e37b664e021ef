"""Logging: one entry a line on standard error, as text or as JSON, without secrets.

The message of an entry is a fixed sentence. `extra` has its stable name, `event`, and the values
that vary. Text appends them as `name=value`; JSON has each as a member.
docs/reference/log-events.md lists the events. Only libraries write entries without an event.

Both formats cut the query string and the user out of every URL, since keys and passwords stand
there.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.errors import SettingsError

TEXT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
FORMATS = ("text", "json")

_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^\s?#\"'<>]*)\?[^\s#\"'<>]+", re.IGNORECASE)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@\"'<>]+@", re.IGNORECASE)

# The field of a traceback that came as text: of a handler, whose exception has ended elsewhere.
TRACEBACK = "traceback"

# A text value that has only these characters needs no quotes.
_BARE = re.compile(r"[^\s\"'=\\]+")

# Attributes that every record has. All others are fields, which `extra` has set.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _no_ids() -> Mapping[str, object]:
    return {}


def configure(
    service: str,
    trace_id: Callable[[], str | None] = lambda: None,
    ids: Callable[[], Mapping[str, object]] = _no_ids,
) -> None:
    """Sends log entries to standard error.

    PENSTOCK_LOG_LEVEL chooses the level (default INFO) and PENSTOCK_LOG_FORMAT the format: text or
    json.

    Args:
        service: the name that each JSON entry has as `service`.
        trace_id: returns the id of the current trace, or None; called for each JSON entry.
        ids: returns members that say what the code is working on; called for each JSON entry.

    Raises:
        SettingsError: PENSTOCK_LOG_FORMAT or PENSTOCK_LOG_LEVEL has an unknown value.
    """
    name = os.environ.get("PENSTOCK_LOG_FORMAT") or "text"
    if name not in FORMATS:
        raise SettingsError(f"PENSTOCK_LOG_FORMAT={name!r} must be one of: {', '.join(FORMATS)}")
    # Without `force`: it would remove the handlers of a test.
    logging.basicConfig(
        level=_level("PENSTOCK_LOG_LEVEL", "INFO"), handlers=[_handler(service, trace_id, ids)]
    )
    quiet_libraries()


def configure_for_errors(service: str) -> None:
    """Configures logging for a process that ends because of wrong settings; never raises."""
    logging.basicConfig(level=logging.ERROR, handlers=[_handler(service)])


def in_json() -> bool:
    """Whether PENSTOCK_LOG_FORMAT is json."""
    return os.environ.get("PENSTOCK_LOG_FORMAT") == "json"


def _handler(
    service: str,
    trace_id: Callable[[], str | None] = lambda: None,
    ids: Callable[[], Mapping[str, object]] = _no_ids,
) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, trace_id, ids) if in_json() else TextFormatter(TEXT))
    return handler


def quiet_libraries() -> None:
    """Silences the client libraries below PENSTOCK_LIBRARY_LOG_LEVEL (default CRITICAL).

    They log every rebalance, and a coordinator that is not available yet as an error. Failures that
    matter reach Penstock as exceptions, and Penstock logs them itself.
    """
    for library in ("aiokafka", "faust", "mode"):
        logging.getLogger(library).setLevel(_level("PENSTOCK_LIBRARY_LOG_LEVEL", "CRITICAL"))


def _level(variable: str, default: str) -> str:
    name = (os.environ.get(variable) or default).upper()
    if name not in (known := logging.getLevelNamesMapping()):
        raise SettingsError(f"{variable}={name!r} must be one of: {', '.join(known)}")
    return name


def redacted(text: str) -> str:
    """The text without the query strings and users of its URLs."""
    if "://" not in text:
        return text
    return _USER.sub(r"\1…@", _QUERY.sub(r"\1?…", text))


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record from `extra`, `event` first, without None and without secrets."""
    found = {
        name: value for name, value in vars(record).items() if name not in STANDARD and value is not None
    }
    event = {"event": found.pop("event")} if "event" in found else {}
    return {name: _field(value) for name, value in (event | found).items()}


def _field(value: object) -> object:
    if isinstance(value, BaseException):
        # Some exceptions have no text, only a type.
        value = str(value) or repr(value)
    return redacted(value) if isinstance(value, str) else value


class TextFormatter(logging.Formatter):
    """Entries for people: the sentence, its fields, and below them the traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the standard library's name)
        """The line with the fields at its end."""
        return "".join(
            [
                super().formatMessage(record),
                *(f" {name}={_quoted(value)}" for name, value in fields(record).items() if name != TRACEBACK),
            ]
        )

    def format(self, record: logging.LogRecord) -> str:
        """The entry, with its traceback below it."""
        below = getattr(record, TRACEBACK, None)
        return redacted(super().format(record) + (f"\n{below.rstrip()}" if below else ""))


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else orjson.dumps(_encodable(text)).decode()


class JsonFormatter(logging.Formatter):
    """Entries for machines: one JSON object a line.

    Members are time, level, service, logger, message, trace_id (when there is one), the fields and
    the ids. An entry with a traceback has it as `error`.

    Args:
        service: the member `service` of each entry.
        trace_id: returns the id of the current trace, or None.
        ids: returns further members; a field of the entry with the same name has precedence.
    """

    def __init__(
        self,
        service: str,
        trace_id: Callable[[], str | None] = lambda: None,
        ids: Callable[[], Mapping[str, object]] = _no_ids,
    ) -> None:
        super().__init__()
        self._ids = ids
        self._service = service
        self._trace_id = trace_id

    def format(self, record: logging.LogRecord) -> str:
        """The entry as one line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if (trace_id := self._trace_id()) is not None:
            entry["trace_id"] = trace_id
        entry |= {name: value for name, value in fields(record).items() if name not in entry}
        entry |= {name: value for name, value in self._ids().items() if name not in entry}
        if record.exc_info:
            entry["error"] = redacted(self.formatException(record.exc_info))
        try:
            return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:
            # A lone surrogate in a submitted text, or an integer beyond 64 bits: the entry must not
            # be lost.
            return orjson.dumps({name: _encodable(str(value)) for name, value in entry.items()}).decode()


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
