"""How processes log: one line an entry on standard error, as text or as JSON, without secrets.

An entry's ids (task, attempt, type, target, …) are given with `extra`; text says them in its sentence, JSON has them as
members of their own. Whatever a library or an exception brings into an entry, what stands behind the `?` of a URL and before the `@` of
its host is cut out: these are the places where keys and passwords are.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.errors import SettingsError

TEXT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
FORMATS = ("text", "json")

_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^\s?#\"'<>]*)\?[^\s#\"'<>]+", re.IGNORECASE)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@\"'<>]+@", re.IGNORECASE)

# What every entry has; the rest was given with `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(service: str, trace_id: Callable[[], str | None] = lambda: None) -> None:
    """Logs to standard error: PENSTOCK_LOG_LEVEL chooses the level (default INFO), PENSTOCK_LOG_FORMAT text or json.

    Args:
        service: told in each entry of JSON.
        trace_id: asked for each entry of JSON: the id of the trace it belongs to.

    Raises:
        SettingsError: there is no such format or level.
    """
    name = os.environ.get("PENSTOCK_LOG_FORMAT") or "text"
    if name not in FORMATS:
        raise SettingsError(f"PENSTOCK_LOG_FORMAT={name!r} must be one of: {', '.join(FORMATS)}")
    # `force` would take away what a test listens with.
    logging.basicConfig(level=_level("PENSTOCK_LOG_LEVEL", "INFO"), handlers=[_handler(service, trace_id)])
    quiet_libraries()


def configure_for_errors(service: str) -> None:
    """As `configure`, for a process that ends because settings are wrong, these here perhaps among them: never raises."""
    logging.basicConfig(level=logging.ERROR, handlers=[_handler(service)])


def in_json() -> bool:
    """Whether JSON is asked for."""
    return os.environ.get("PENSTOCK_LOG_FORMAT") == "json"


def _handler(service: str, trace_id: Callable[[], str | None] = lambda: None) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, trace_id) if in_json() else TextFormatter(TEXT))
    return handler


def quiet_libraries() -> None:
    """Leaves out what the client libraries log, unless PENSTOCK_LIBRARY_LOG_LEVEL asks for it.

    They narrate every rebalance, and call it an error when a coordinator is not there yet; what matters of it is
    raised to us, and we say it ourselves.
    """
    for chatty in ("aiokafka", "faust", "mode"):
        logging.getLogger(chatty).setLevel(_level("PENSTOCK_LIBRARY_LOG_LEVEL", "CRITICAL"))


def _level(variable: str, default: str) -> str:
    name = (os.environ.get(variable) or default).upper()
    if name not in (known := logging.getLevelNamesMapping()):
        raise SettingsError(f"{variable}={name!r} must be one of: {', '.join(known)}")
    return name


def shortened(text: str) -> str:
    """The text with the query strings and the users of its URLs cut out."""
    if "://" not in text:
        return text
    return _USER.sub(r"\1…@", _QUERY.sub(r"\1?…", text))


class TextFormatter(logging.Formatter):
    """A sentence for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry, with its traceback below it."""
        return shortened(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, `error` with a traceback, and the entry's ids.

    Args:
        service: told in each entry.
        trace_id: told too, where there is one.
    """

    def __init__(self, service: str, trace_id: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self._service = service
        self._trace_id = trace_id

    def format(self, record: logging.LogRecord) -> str:
        """The entry as one line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": shortened(record.getMessage()),
        }
        if (trace_id := self._trace_id()) is not None:
            entry["trace_id"] = trace_id
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in entry and value is not None:
                entry[name] = shortened(value) if isinstance(value, str) else value
        if record.exc_info:
            entry["error"] = shortened(self.formatException(record.exc_info))
        # What cannot be JSON (an odd object, a lone surrogate in what somebody sent) is told all the same.
        try:
            return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:
            return orjson.dumps({key: _plain(value) for key, value in entry.items()}).decode()


def _plain(value: object) -> str:
    return str(value).encode(errors="backslashreplace").decode()
