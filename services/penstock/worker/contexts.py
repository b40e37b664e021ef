"""Contexts in the object store, as handlers receive and return them.

An outage of the store is not a failure of an attempt. An attempt that cannot read its context is
handed back before its handler runs, and its place is free for others. The outcome of a handler
waits until its context is stored, because the handler would do its work again.
"""

from __future__ import annotations

from typing import Any

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.access import namespace_of
from penstock.errors import ObjectsUnavailable, Unavailable
from penstock.objects import ObjectStore


class Contexts:
    """Reads and stores the contexts of attempts.

    Args:
        objects: of large contexts; None leaves them inline, for a gateway to store.
    """

    def __init__(self, objects: ObjectStore | None) -> None:
        self._objects = objects

    async def value_of(self, ready: ReadyTask) -> Any:
        """The value that the handler of an attempt receives.

        Raises:
            ObjectsUnavailable: the store does not answer at all.
            Unavailable: it does not return this object, and answers otherwise.
            CorruptObject: the object is missing, or differs from its reference.
        """
        context = ready.context
        if context.ref and self._objects:
            try:
                context = await self._objects.check_out(context, namespace_of(ready.type))
            except ObjectsUnavailable as error:
                if await self._objects.answers():
                    raise Unavailable(str(error)) from error
                raise
        return context.decode()

    async def stored(self, context: Context, ready: ReadyTask) -> Context:
        """The context of an outcome; waits until its object is stored, if it is large."""
        objects = self._objects
        if objects is None:
            return context
        return await retry_until_available(
            lambda: objects.check_in(context, namespace_of(ready.type)),
            waiting_for="store of a large context",
            backoff=WORKER_BACKOFF,
        )
