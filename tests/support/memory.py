"""How much memory a repeated call leaves behind."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def growth_bytes(work: Callable[[int], object], *, times: int = 20_000) -> int:
    """Calls `work` with 0, 1, 2 and so on; returns the bytes that the last nine tenths left
    behind."""
    tracemalloc.start()
    try:
        for number in range(times // 10):
            work(number)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(times // 10, times):
            work(number)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
