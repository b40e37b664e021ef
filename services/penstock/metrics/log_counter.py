"""Counts log entries for the metrics of a process."""

from __future__ import annotations

import logging


class LogCounter(logging.Handler):
    """Counts log entries.

    Attributes:
        warnings: entries of level WARNING.
        errors: entries of a higher level.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings = self.errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one entry."""
        if record.levelno > logging.WARNING:
            self.errors += 1
        else:
            self.warnings += 1
