"""Archive objects of history: gzipped lines, written and verified in bounded memory.

Writes are atomic and deterministic: the same lines give the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from penstock.errors import CorruptObject
from penstock.objects import ObjectStore

# The gzip format, with header and checksum. The header has no timestamp, so the bytes are
# deterministic.
_GZIP = 16 + zlib.MAX_WBITS
# Lines are similar, so a low level compresses nearly as well as a high one.
_LEVEL = 3
# Most bytes decompressed at once: a small object may expand to a large one.
_MOST_DECOMPRESSED = 1 << 20


@dataclass(frozen=True, slots=True)
class ArchiveObject:
    """A written or verified archive object.

    Attributes:
        lines: number of lines.
        size: compressed size in bytes.
        sha256: digest of the compressed object, in hexadecimal digits.
    """

    lines: int
    size: int
    sha256: str


async def write(store: ObjectStore, object_key: str, pages: AsyncIterator[Sequence[bytes]]) -> ArchiveObject:
    """Writes pages of lines, each line with its line feed.

    Raises:
        ObjectsUnavailable: the object was not written; an earlier one is unchanged.
        Exception: any exception of `pages`, with the same effect.
    """
    compressor = zlib.compressobj(_LEVEL, wbits=_GZIP)
    digest = hashlib.sha256()
    lines = size = 0

    def compressed(page: Sequence[bytes]) -> bytes:
        data = b"".join(map(compressor.compress, page))
        digest.update(data)
        return data

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal lines, size
        async for page in pages:
            lines += len(page)
            # In a thread, since compression would block the event loop.
            data = await asyncio.to_thread(compressed, page)
            size += len(data)
            if data:
                yield data
        rest = compressor.flush()
        digest.update(rest)
        size += len(rest)
        yield rest

    await store.put_chunks(object_key, chunks())
    return ArchiveObject(lines, size, digest.hexdigest())


async def read_back(store: ObjectStore, object_key: str) -> ArchiveObject:
    """Reads a whole archive object to verify it.

    Raises:
        CorruptObject: the object does not exist, is truncated or cannot be decompressed.
        ObjectsUnavailable: the store does not answer.
    """
    decompressor = zlib.decompressobj(wbits=_GZIP)
    digest = hashlib.sha256()
    lines = size = 0

    def lines_in(data: bytes) -> int:
        digest.update(data)
        count = 0
        while data:
            count += decompressor.decompress(data, _MOST_DECOMPRESSED).count(b"\n")
            data = decompressor.unconsumed_tail
        return count

    async for chunk in store.chunks(object_key):
        size += len(chunk)
        try:
            lines += await asyncio.to_thread(lines_in, chunk)
        except zlib.error as error:
            raise CorruptObject(f"object {object_key} cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise CorruptObject(f"object {object_key} is truncated after {size:,} bytes")
    return ArchiveObject(lines, size, digest.hexdigest())
