"""Contexts in the object store, as handlers receive and return them.

An outage of the store is not a failure of an attempt. An attempt that cannot read its context is
handed back before its handler runs, and its place is free for others. The result of a handler
waits until its context is stored, because the handler would do its work again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, unwritable
from penstock.core.access import namespace_of
from penstock.core.attempt import AttemptId
from penstock.errors import ObjectsUnavailable, Unavailable
from penstock.objects import ObjectStore


class Contexts:
    """Reads the contexts of attempts.

    Args:
        objects: of large contexts; None leaves references to a gateway.
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


class ResultContexts:
    """Stores the large contexts of results.

    Args:
        objects: of large contexts.
        type_of: returns the type of an attempt; None when it is no longer in flight.
    """

    def __init__(self, objects: ObjectStore, type_of: Callable[[AttemptId], str | None]) -> None:
        self._objects = objects
        self._type_of = type_of

    async def stored(self, result: StageResult) -> StageResult | None:
        """The result with a reference; waits until the object is stored.

        Returns None when the attempt is lost or revoked meanwhile.
        """

        async def store() -> StageResult | None:
            type_name = self._type_of(result.fence.attempt_id)
            if type_name is None or result.context is None:
                return None
            context = await self._objects.check_in(result.context, namespace_of(type_name))
            return dataclasses.replace(result, context=context)

        try:
            return await retry_until_available(
                store, waiting_for="store of a large context", backoff=WORKER_BACKOFF
            )
        except Exception as error:  # noqa: BLE001 (the error becomes the result of its attempt)
            return unwritable(result, repr(error)[:1000])
