"""Contents of objects, so that a transaction never waits for the object store.

A decision that needs an object which is not here ends without effect. The owner fetches the object,
applies other flows meanwhile, and decides again. What it fetched for a family is pinned until the
family is advanced: otherwise the objects of one decision could evict each other without end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from penstock.contracts.context import INLINE_LIMIT_BYTES, Context, ObjectRef
from penstock.errors import CorruptObject, InvalidExpression, TooLarge
from penstock.flow_owner.result_lists import LIMIT_BYTES, ResultLists
from penstock.objects import ObjectStore

# Bytes of contents that one process keeps.
KEPT_BYTES = 128 * 1024 * 1024
# Bytes of pinned contents, in addition. More cannot be read in one decision.
PINNED_BYTES = 256 * 1024 * 1024
# Digests of objects that are known to be in the store.
_STORED_KEPT = 100_000
_CONCURRENT = 16


class ContentsMissing(Exception):  # noqa: N818 (a signal to the owner, which handles it)
    """A decision needs the object of a context that this process does not have."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.ref)
        self.context = context


class Contents:
    """A bounded cache of objects, by their keys.

    Args:
        objects: the store.

    Attributes:
        lists: lists of results of maps.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self.lists = ResultLists(objects)
        self._objects = objects
        self._kept: OrderedDict[str, Context] = OrderedDict()
        self._kept_bytes = 0
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._unreadable: dict[str, str] = {}
        # Keys and bytes by root flow.
        self._pinned: dict[int, dict[str, int]] = {}
        self._refused: dict[int, set[str]] = {}

    def resolve(self, context: Context, root: int) -> Context:
        """The context with its value in place of a reference.

        Args:
            context: a value or a reference.
            root: the root flow of the family that reads it.

        Raises:
            ContentsMissing: `fetch` must fetch it first.
            InvalidExpression: it can never be read.
        """
        if context.ref is None:
            return context
        if reason := self._unreadable.get(context.ref.key):
            raise InvalidExpression(reason)
        if context.ref.key in self._refused.get(root, ()):
            raise InvalidExpression(
                f"the large values that are read at once have more than {PINNED_BYTES:,} bytes: read fewer of them, or "
                "pass them on by naming the output alone"
            )
        found = self._kept.get(context.ref.key)
        if found is None:
            raise ContentsMissing(context)
        # The list of a map is read once for each chunk of its items.
        found = Context(found.content_type, found.data, value=found.decode())
        self._kept[context.ref.key] = found
        self._kept.move_to_end(context.ref.key)
        return found

    def refer(self, context: Context, namespace: str, unstored: dict[str, tuple[Context, str]]) -> Context:
        """A reference to a context above the inline limit; others are unchanged.

        Args:
            context: inline.
            namespace: of the flow or task that gets it.
            unstored: gets the context by its key, with its namespace, if `store` must store it
                before the transaction commits.
        """
        if context.data is None or len(context.data) <= INLINE_LIMIT_BYTES:
            return context
        ref = ObjectRef.of(context.data, namespace)
        if ref.key not in self._stored:
            unstored[ref.key] = (context, namespace)
        self._keep(ref.key, context)
        return Context(context.content_type, ref=ref)

    def pin(self, root: int, contexts: Iterable[Context]) -> bool:
        """Keeps objects, once they are fetched, until `unpin`.

        While other families have pinned too much, a family pins nothing and is tried again.

        Args:
            root: the root flow of the family that needs them.
            contexts: references.

        Returns:
            False when this family alone would pin more than `PINNED_BYTES`.
        """
        wanted = dict(self._pinned.get(root, {}))
        wanted |= {each.ref.key: each.ref.size for each in contexts if each.ref is not None}
        others = sum(sum(keys.values()) for one, keys in self._pinned.items() if one != root)
        size = sum(wanted.values())
        if size <= PINNED_BYTES - others:
            self._pinned[root] = wanted
        return size <= PINNED_BYTES

    def refuse(self, root: int, contexts: Iterable[Context]) -> None:
        """Fails expressions of a family that read these objects, until `unpin`."""
        keys = {each.ref.key for each in contexts if each.ref is not None}
        self._refused.setdefault(root, set()).update(keys)

    def unpin(self, roots: Iterable[int]) -> None:
        """Forgets what families have pinned, what was refused to them, and what was unreadable."""
        for root in roots:
            self._refused.pop(root, None)
            if keys := self._pinned.pop(root, None):
                # An operator may restore an object before the flow is recovered.
                for key in keys:
                    self._unreadable.pop(key, None)
                self._evict()

    async def fetch(self, contexts: Iterable[Context]) -> None:
        """Fetches objects.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        for context in contexts:
            assert context.ref is not None
            try:
                found = await self._objects.check_out(context, context.ref.namespace, limit_bytes=LIMIT_BYTES)
            except (CorruptObject, TooLarge) as error:
                self._unreadable[context.ref.key] = str(error)
            else:
                self._keep(context.ref.key, found)

    async def store(self, contexts: Iterable[tuple[Context, str]]) -> None:
        """Stores contexts, each with its namespace.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        places = asyncio.Semaphore(_CONCURRENT)

        async def one(context: Context, namespace: str) -> None:
            async with places:
                stored = await self._objects.check_in(context, namespace)
            if stored.ref is not None:
                self._stored[stored.ref.key] = None

        async with asyncio.TaskGroup() as group:
            for context, namespace in contexts:
                group.create_task(one(context, namespace))
        while len(self._stored) > _STORED_KEPT:
            self._stored.popitem(last=False)

    def _keep(self, key: str, context: Context) -> None:
        if key in self._kept:
            return
        self._kept[key] = context
        self._kept_bytes += len(context.data or b"")
        self._evict(key)

    def _evict(self, newest: str = "") -> None:
        if self._kept_bytes <= KEPT_BYTES:
            return
        pinned = {key for keys in self._pinned.values() for key in keys}
        for key in [key for key in self._kept if key not in pinned and key != newest]:
            self._kept_bytes -= len(self._kept.pop(key).data or b"")
            if self._kept_bytes <= KEPT_BYTES:
                return
