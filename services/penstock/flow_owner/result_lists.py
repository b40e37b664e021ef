"""Lists of results of maps, collected outside the owner's transaction and in bounded memory.

A decision that needs a long list, or one with results in the object store, ends without effect. The
owner reads the results part by part, stores the list as one object, and decides again. The key of
the object comes from its content, so a repetition after a crash writes the same object.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import asyncpg
import orjson

from penstock.contracts.context import DEPTH_LIMIT, ContentType, Context, ObjectRef, too_deep
from penstock.core.flow.result_parts import groups, parts
from penstock.errors import CorruptObject, TooLarge
from penstock.objects import ObjectStore
from penstock.postgres.tasks import context_of

Row: TypeAlias = Mapping[str, Any] | asyncpg.Record
# Runs a named statement.
Fetch: TypeAlias = Callable[..., Awaitable[Sequence[Row]]]

# The largest result that becomes part of a list.
LIMIT_BYTES = 64 * 1024 * 1024
# A list up to this size is stored from memory. A longer one is read twice, because the key of an
# object has its digest.
HELD_BYTES = 16 * 1024 * 1024
# Lists that are collected at the same time.
_CONCURRENT = 2
# The largest list. The family is held while its list is read and written.
LIST_BYTES = 1024 * 1024 * 1024
# Families with lists that no commit has used yet, and maps that wait for a commit: more than one
# transaction has.
_KEPT = 10_000
# The list, and the objects around it in the context of a task that has waited.
_LEVELS = 3
_NULL = b"null"


class ItemResults(NamedTuple):
    """The results of the items of a map, which are to become one context.

    Attributes:
        root_id: the root of the flow.
        flow_id: the flow.
        node: the map.
        generation: of the map.
        total: number of its items.
        is_task: whether the items are tasks; otherwise they are child flows.
        namespace: of the context.
        opening: JSON before the list, up to its name, of the context of a task that has waited for
            its children; None for the list alone.
    """

    root_id: int
    flow_id: int
    node: str
    generation: int
    total: int
    is_task: bool
    namespace: str
    opening: bytes | None = None

    @property
    def statement(self) -> str:
        """The statement that reads some of the results."""
        return "flows.item_results" if self.is_task else "flows.item_outputs"

    def framed(self, pieces: Sequence[bytes], faults: Faults) -> bytes:
        """The context of the results of a list that is in memory."""
        return b"".join([self.begin, b",".join(pieces), self.end(faults)])

    @property
    def key(self) -> ItemResults:
        """The same without what is before the list, which may be large: its digest instead."""
        digest = self.opening and hashlib.sha256(self.opening).digest()
        return self._replace(opening=digest)

    def without_list(self, faults: Faults) -> bytes:
        """The context if the list is larger than `LIST_BYTES`: null in its place."""
        if self.opening is None:
            return _NULL
        error = orjson.dumps(faults.reason)
        return self.opening + _NULL + b'},"error":' + error + b"}"

    @property
    def begin(self) -> bytes:
        """JSON before the first result."""
        return (self.opening or b"") + b"["

    def end(self, faults: Faults) -> bytes:
        """JSON behind the last result."""
        if self.opening is None:
            return b"]"
        error = b',"error":' + orjson.dumps(faults.reason) if faults.reason else b""
        return b"]}" + error + b"}"


class Faults:
    """Results that can never be read, which are null in their list.

    Attributes:
        reason: the first one, and how many there are; empty for none.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._count = 0
        self._first = ""

    def too_large(self) -> None:
        """The list is larger than `LIST_BYTES`."""
        self.reason = (
            f"the results have more than {LIST_BYTES:,} bytes together, so the output is null: "
            "let the items end with references to what they made"
        )

    def add(self, item: int, fault: str) -> None:
        """Adds the result of an item."""
        self._count += 1
        self._first = self._first or f"item {item}: {fault}"
        more = f"; so are {self._count - 1:,} more" if self._count > 1 else ""
        self.reason = f"a result cannot be read and is null in the output: {self._first}{more}"


class Collected(NamedTuple):
    """A list that is stored.

    Attributes:
        context: the list, or its reference.
        fault: which results are null because they cannot be read; empty for none.
    """

    context: Context
    fault: str


class Uncollected(Exception):  # noqa: N818 (a signal to the owner, which handles it)
    """A decision needs a list that is not collected.

    Attributes:
        results: of the list; None if child flows of the same transaction have to be committed
            first.
    """

    def __init__(self, results: ItemResults | None) -> None:
        super().__init__(results)
        self.results = results


class ResultLists:
    """Collects the lists of results of maps.

    Args:
        objects: the store.

    Attributes:
        committed_first: maps whose child flows report their ends by the inbox, by flow and node: a
            list is read outside the transaction, which does not see the ends within it.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._collected: OrderedDict[int, dict[ItemResults, Collected]] = OrderedDict()
        self._turns = asyncio.Semaphore(_CONCURRENT)
        self.committed_first: OrderedDict[tuple[int, str], None] = OrderedDict()

    async def get(self, results: ItemResults, fetch: Fetch, *, is_committed: bool) -> Collected:  # noqa: ARG002 (for lists that are read at once)
        """A list that `collect` has collected.

        Args:
            results: of which map.
            fetch: reads inside the transaction.
            is_committed: whether the ends of all items are.

        Raises:
            Uncollected: it is not collected.
        """
        if (found := self._collected.get(results.root_id, {}).get(results.key)) is not None:
            self.committed_first.pop((results.flow_id, results.node), None)
            return found
        if is_committed:
            raise Uncollected(results)
        self.committed_first[results.flow_id, results.node] = None
        _shorten(self.committed_first)
        raise Uncollected(None)

    async def collect(self, results: ItemResults, fetch: Fetch) -> None:
        """Reads the results, and stores their list.

        Args:
            results: of which map.
            fetch: reads outside the owner's transactions.

        Raises:
            ObjectsUnavailable: the store does not answer.
            PostgresUnavailable: no server.
        """
        async with self._turns:
            while (found := await self._collect(results, fetch)) is None:
                # A late result has changed the list between its two readings.
                continue
        self._collected.setdefault(results.root_id, {})[results.key] = found
        _shorten(self._collected)

    def release(self, roots: Iterable[int]) -> None:
        """Forgets the lists of families whose decisions are committed.

        Until then all of them are kept: a transaction that needs several lists needs them at once.
        """
        for root in roots:
            self._collected.pop(root, None)

    async def _collect(self, results: ItemResults, fetch: Fetch) -> Collected | None:
        digest, size, faults = hashlib.sha256(), 0, Faults()
        held: list[bytes] = []
        async for data in self._read(results, fetch, faults):
            digest.update(data)
            size += len(data)
            if size > LIST_BYTES:
                faults.too_large()
                context = Context(ContentType.JSON, results.without_list(faults))
                return Collected(await self._objects.check_in(context, results.namespace), faults.reason)
            if size <= HELD_BYTES:
                held.append(data)
            else:
                held.clear()
        ref = ObjectRef.named(digest.hexdigest(), size, results.namespace)
        if size <= HELD_BYTES:
            context = Context(ContentType.JSON, b"".join(held))
            return Collected(await self._objects.check_in(context, results.namespace), faults.reason)
        try:
            await self._objects.put_chunks(ref.key, self._verified(results, fetch, ref))
        except _Changed:
            return None
        return Collected(Context(ContentType.JSON, ref=ref), faults.reason)

    async def _verified(self, results: ItemResults, fetch: Fetch, ref: ObjectRef) -> AsyncIterator[bytes]:
        digest = hashlib.sha256()
        async for data in self._read(results, fetch, Faults()):
            digest.update(data)
            yield data
        if digest.hexdigest() != ref.sha256:
            # The store keeps no object of chunks that end with an error.
            raise _Changed

    async def _read(self, results: ItemResults, fetch: Fetch, faults: Faults) -> AsyncIterator[bytes]:
        """The context, a group of results at a time."""
        separator = results.begin
        for part in parts(results.total):
            rows = await fetch_part(results, fetch, part)
            sizes = [ref.size if (ref := _ref_of(row)) is not None else 0 for row in rows]
            for group in groups(sizes):
                pieces = await asyncio.gather(
                    *(self._piece(part[index], rows[index], faults) for index in group)
                )
                yield separator + b",".join(pieces)
                separator = b","
        # An empty list has no part.
        yield (separator if not results.total else b"") + results.end(faults)

    async def _piece(self, item: int, row: Row | None, faults: Faults) -> bytes:
        context = result_of(row)
        if context is not None and context.ref is not None:
            try:
                context = await self._objects.check_out(
                    context, context.ref.namespace, limit_bytes=LIMIT_BYTES
                )
            except (CorruptObject, TooLarge) as error:
                faults.add(item, str(error))
                return _NULL
        return encoded(item, context, faults)


class _Changed(Exception):  # noqa: N818 (ends an upload)
    """The list is not the one that was read before."""


async def fetch_part(results: ItemResults, fetch: Fetch, part: range) -> list[Row | None]:
    """The rows of some items; None for an item without a child."""
    rows: list[Row | None] = [None] * len(part)
    for row in await fetch(
        results.statement,
        flow_id=results.flow_id,
        node=results.node,
        first=part.start,
        last=part.stop - 1,
    ):
        rows[row["item"] - part.start] = row
    return rows


def result_of(row: Row | None) -> Context | None:
    """The result of an item that succeeded."""
    return context_of(row, "result") if row is not None and row["state"] == "succeeded" else None


def encoded(item: int, context: Context | None, faults: Faults) -> bytes:
    """An inline result as JSON; bytes are in base64."""
    if context is None:
        return _NULL
    if context.content_type is not ContentType.JSON:
        value = context.decode()
        return orjson.dumps(base64.b64encode(value).decode() if isinstance(value, bytes) else value)
    data = context.data
    assert data is not None
    if data.count(b"[") + data.count(b"{") > DEPTH_LIMIT - _LEVELS:
        value = [[[context.decode()]]]
        if too_deep(orjson.dumps(value), value):
            faults.add(item, f"in a list it is nested deeper than {DEPTH_LIMIT} levels")
            return _NULL
    return data


def _ref_of(row: Row | None) -> ObjectRef | None:
    context = result_of(row)
    return None if context is None else context.ref


def _shorten(found: OrderedDict[Any, Any]) -> None:
    while len(found) > _KEPT:
        found.popitem(last=False)
