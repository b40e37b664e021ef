"""The log of a task as its handler writes it: a message and fields.

What a handler logs by `logging` or prints is in the same log.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from penstock.worker.log_buffer import RunLog

SOURCE = "task"


class TaskLog:
    """Writes lines with fields; may be used from any thread, and never raises.

    Fields may have any values. Those that JSON lacks become text, and secrets are redacted.

    Args:
        run: the log of the run; None writes to the worker's own log.
    """

    __slots__ = ("_run",)

    def __init__(self, run: RunLog | None) -> None:
        self._run = run

    def debug(self, message: str, **fields: Any) -> None:
        """Adds a line of level DEBUG."""
        self._add(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        """Adds a line of level INFO."""
        self._add(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Adds a line of level WARNING."""
        self._add(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        """Adds a line of level ERROR, which is shipped at once."""
        self._add(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """Adds a line of level ERROR, with the traceback of the exception that is handled."""
        self._add(logging.ERROR, f"{message}\n{traceback.format_exc().rstrip()}", fields)

    def _add(self, level: int, message: str, fields: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.add(level, SOURCE, str(message), fields)
        else:
            logging.getLogger("penstock.task").log(level, "%s %s", message, fields or "")
