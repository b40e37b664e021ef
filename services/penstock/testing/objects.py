"""An object store in memory, whose contents can be read without waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.contracts.context import INLINE_LIMIT_BYTES, ContentType, Context, ObjectRef
from penstock.errors import CorruptObject
from penstock.objects import ObjectStore


class KeptObjects(ObjectStore):
    """Large contexts, as an object store has them."""

    def __init__(self) -> None:
        super().__init__("memory:///")
        self._kept: dict[str, Context] = {}

    async def check_out(self, context: Context, namespace: str, *, limit_bytes: int | None = None) -> Context:  # noqa: ARG002 (memory has all it refers to)
        """The context with its value in place of a reference.

        Raises:
            CorruptObject: the object does not exist.
        """
        return self.value_of(context)

    async def check_in(self, context: Context, namespace: str) -> Context:
        """As `keep`."""
        return self.keep(context, namespace)

    async def put_chunks(self, object_key: str, chunks: AsyncIterator[bytes]) -> None:
        """Keeps a JSON context, which comes in chunks."""
        data = b"".join([chunk async for chunk in chunks])
        self._kept[object_key] = Context(ContentType.JSON, data)

    def keep(self, context: Context, namespace: str) -> Context:
        """Keeps a large context, and returns its reference; others are unchanged."""
        if context.data is None or len(context.data) <= INLINE_LIMIT_BYTES:
            return context
        ref = ObjectRef.of(context.data, namespace)
        self._kept[ref.key] = context
        return Context(context.content_type, ref=ref)

    def value_of(self, context: Context) -> Context:
        """The context with its value in place of a reference.

        Raises:
            CorruptObject: the object does not exist.
        """
        if context.ref is None:
            return context
        found = self._kept.get(context.ref.key)
        if found is None:
            raise CorruptObject(f"there is no object {context.ref.key}")
        return found
