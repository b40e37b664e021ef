"""Captures what handlers log, as a worker process does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.worker.capture import capturing


@contextmanager
def capturing_logs(mode: str) -> Iterator[None]:
    """Captures for the time of a `with` block, from INFO on, unless a test wants more.

    Args:
        mode: as `WorkerSettings.task_logs`.
    """
    root = logging.getLogger()
    level = root.level
    if level > logging.INFO:
        root.setLevel(logging.INFO)
    try:
        with capturing(mode):
            yield
    finally:
        if root.level == logging.INFO:
            root.setLevel(level)
