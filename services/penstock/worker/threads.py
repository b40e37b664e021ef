"""Calls blocking code of handlers on threads of its own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from penstock import forking

# The value that a function has returned, or its exception.
Ended = tuple[Any, None] | tuple[None, BaseException]


def start_thread(function: Callable[[], Any], name: str) -> asyncio.Future[Ended]:
    """Calls a function on its own daemon thread, which cannot keep the process alive.

    Args:
        function: sees the context variables of the caller.
        name: of the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Ended] = loop.create_future()
    context, process = contextvars.copy_context(), os.getpid()

    def settle(ended: Ended) -> None:
        if not future.done():
            future.set_result(ended)
        elif inspect.iscoroutine(ended[0]):
            # Nothing awaits it any more: it would warn.
            ended[0].close()

    def run() -> None:
        ended: Ended
        try:
            ended = (context.run(function), None)
        except BaseException as error:  # noqa: BLE001 (fails closed: the loop raises it, and the attempt fails)
            ended = (None, error)
        forking.end_if_child(process, ended[1])
        # The process may have stopped meanwhile.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
