"""The attempts of this process that failed because a server is unavailable.

While they grow in number, a server is away and the process tries again. What waits for the server
has not stalled then, and the end of the process would not help.
"""

from __future__ import annotations

import itertools

_counter = itertools.count(1)
_failed = 0


def count_failed_attempt() -> None:
    """Counts an attempt that failed and is repeated; any thread may call this."""
    global _failed  # noqa: PLW0603 (of the process)
    _failed = next(_counter)


def failed_attempts() -> int:
    """The attempts that failed so far."""
    return _failed
