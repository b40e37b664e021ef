"""Keeps `SystemExit` of a handler's tasks from the event loop of the test, as a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from penstock.concurrency.exits import log_refused
from penstock.worker.current import current_attempt


@contextmanager
def refusing_exits(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Refuses exits of tasks and callbacks that handlers start, for the time of a `with` block.

    The test runs the loop, which would end with an exit, unlike that of `concurrency.exits`. Exits
    of the test's own tasks still end the test, and so do those of timers (`call_later`).
    """
    patched = cast("Any", loop)
    before, was_patched = loop.call_soon, "call_soon" in vars(loop)

    def call(callback: Callable[..., object], *args: Any) -> None:
        try:
            callback(*args)
        except SystemExit as error:
            if current_attempt.get() is None:
                raise
            log_refused(error)

    def call_soon(callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        return before(call, callback, *args, context=context)

    patched.call_soon = call_soon
    try:
        yield
    finally:
        # A pipeline that is still open on this loop may have been there before, or may follow.
        if patched.call_soon is call_soon:
            del patched.call_soon
            if was_patched:
                patched.call_soon = before
