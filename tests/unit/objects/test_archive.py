"""The archive: lines written to the object store piece by piece, and read back."""

import asyncio
import gzip
import random
import tracemalloc
from pathlib import Path

import pytest

from penstock.contracts.context import Context
from penstock.errors import CorruptObject
from penstock.objects import ObjectStore, archive

KEY = "history/day=2026-11-21/part-1.ndjson.gz"


async def pages(*found):
    for page in found:
        await asyncio.sleep(0)
        yield page


async def test_what_is_written_is_what_is_read_back(tmp_path):
    """O6: lines and bytes are equal, also for gzip(1) and for an empty archive."""
    store = ObjectStore(f"file://{tmp_path}")
    lines = [f'{{"id":{n}}}\n'.encode() for n in range(10_000)]
    for found in ([], [lines[:1]], [lines[:3000], [], lines[3000:]]):
        written = await archive.write(store, KEY, pages(*found))
        assert await archive.read_back(store, KEY) == written
        data = (tmp_path / KEY).read_bytes()
        assert written.size == len(data) == await store.size_of(KEY)
        assert gzip.decompress(data).splitlines(keepends=True) == [line for page in found for line in page]
        assert written.lines == sum(map(len, found))
    assert await archive.write(store, KEY, pages(lines)) == written, "the same lines are the same object"


async def test_a_damaged_object_is_detected(tmp_path):
    """O6: a truncated, altered, replaced or missing object does not pass for an archive."""
    store = ObjectStore(f"file://{tmp_path}")
    written = await archive.write(store, KEY, pages([b'{"id":%d}\n' % n for n in range(5000)]))
    file = tmp_path / KEY
    data = file.read_bytes()
    for bad in (data[: len(data) // 2], data[:-1], b"", b"no gzip", data[:100] + b"\0\0" + data[102:]):
        file.write_bytes(bad)
        with pytest.raises(CorruptObject):
            await archive.read_back(store, KEY)
    file.write_bytes(gzip.compress(b'{"id":1}\n'))
    assert await archive.read_back(store, KEY) != written
    file.unlink()
    with pytest.raises(CorruptObject, match="not in the store"):
        await archive.read_back(store, KEY)
    assert await store.size_of(KEY) is None


async def test_an_aborted_write_leaves_the_object_unchanged(tmp_path):
    """O6: writes are atomic, when the pages fail and when the writer is cancelled."""
    store = ObjectStore(f"file://{tmp_path}")
    reached = asyncio.Event()

    async def failing():
        yield [b"{}\n"]
        raise RuntimeError("cut")

    async def endless():
        yield [b"{}\n"]
        reached.set()
        await asyncio.Event().wait()

    for before in (None, b"as it was"):
        if before:
            (tmp_path / KEY).write_bytes(before)
        with pytest.raises(RuntimeError, match="cut"):
            await archive.write(store, KEY, failing())
        writing = asyncio.ensure_future(archive.write(store, KEY, endless()))
        await reached.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert (tmp_path / KEY).read_bytes() == before if before else not (tmp_path / KEY).exists()


async def test_memory_is_bounded_for_large_days(tmp_path):
    """O6: 60 MB of incompressible lines are written and verified in a fraction of that
    memory."""
    store = ObjectStore(f"file://{tmp_path}")

    async def many():
        for _ in range(60):
            yield [(await asyncio.to_thread(_noise, 1_000_000)) + b"\n"]

    tracemalloc.start()
    try:
        written = await archive.write(store, KEY, many())
        assert await archive.read_back(store, KEY) == written
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written.size > 50_000_000
    assert peak < 20_000_000


def _noise(size):
    return random.randbytes(size).replace(b"\n", b"")


async def test_a_context_submitted_again_is_as_young_as_its_last_submission(tmp_path: Path) -> None:
    """T4: docs/how-to/large-contexts.md tells to delete contexts by age, which is right only if
    storing one again makes it young."""
    store = ObjectStore(f"file://{tmp_path}")
    kept = await store.check_in(Context.encode("x" * 10_000), "default")
    file = tmp_path / kept.ref.key
    before = file.stat().st_ino, file.stat().st_mtime_ns
    assert await store.check_in(Context.encode("x" * 10_000), "default") == kept
    assert (file.stat().st_ino, file.stat().st_mtime_ns) != before
