"""Writing a part of history to the object store, and reading it back: gzipped lines, in bounded memory.

An object appears whole or not at all, and written again from the same lines it is the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from penstock.errors import CorruptObject
from penstock.objects import ObjectStore

# With a header and a checksum, as gzip(1) writes them; the header has no time.
_GZIP = 16 + zlib.MAX_WBITS
# Lines are alike, so little effort finds most of it.
_LEVEL = 3
# Of what is unpacked at a time: a small object may hold a lot.
_UNPACKED = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """An object of lines.

    Attributes:
        lines: how many.
        size: of the object, in bytes.
        sha256: of the object, in hexadecimal digits.
    """

    lines: int
    size: int
    sha256: str


async def write(store: ObjectStore, key: str, pages: AsyncIterator[Sequence[bytes]]) -> Written:
    """Writes lines, each with its line feed, page by page.

    Raises:
        ObjectsUnavailable: the object is as it was before, or not there.
        Exception: whatever `pages` raises, likewise.
    """
    packing = zlib.compressobj(_LEVEL, wbits=_GZIP)
    digest = hashlib.sha256()
    lines = size = 0

    def packed(page: Sequence[bytes]) -> bytes:
        data = b"".join(map(packing.compress, page))
        digest.update(data)
        return data

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal lines, size
        async for page in pages:
            lines += len(page)
            # In a thread: the loop has other things to do.
            data = await asyncio.to_thread(packed, page)
            size += len(data)
            if data:
                yield data
        rest = packing.flush()
        digest.update(rest)
        size += len(rest)
        yield rest

    await store.put_chunks(key, chunks())
    return Written(lines, size, digest.hexdigest())


async def read_back(store: ObjectStore, key: str) -> Written:
    """What an object of lines really is, read from its beginning to its end.

    Raises:
        CorruptObject: it is not there, or is not whole.
        ObjectsUnavailable: the store does not answer.
    """
    unpacking = zlib.decompressobj(wbits=_GZIP)
    digest = hashlib.sha256()
    lines = size = 0

    def unpacked(data: bytes) -> int:
        digest.update(data)
        found = 0
        while data:
            found += unpacking.decompress(data, _UNPACKED).count(b"\n")
            data = unpacking.unconsumed_tail
        return found

    async for chunk in store.chunks(key):
        size += len(chunk)
        try:
            lines += await asyncio.to_thread(unpacked, chunk)
        except zlib.error as error:
            raise CorruptObject(f"object {key} cannot be unpacked: {error}") from error
    if not unpacking.eof:
        raise CorruptObject(f"object {key} ends after {size:,} bytes, before its end")
    return Written(lines, size, digest.hexdigest())
