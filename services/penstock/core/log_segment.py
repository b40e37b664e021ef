"""A segment: an object with the chunks of one partition, as gzip blocks with an index. Pure.

A block is a gzip member with one chunk a line, in the order of runs. The index is the last member,
behind it stand eight bytes with its length. So `gzip -dc` shows the content of a segment.

A segment's filter tells which tasks it may have; a task that it has is always among them.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.core.log_chunk import Chunk, RunId, merged
from penstock.errors import CorruptObject

# Raw bytes of a block. A reader decompresses a block at a time.
BLOCK_BYTES = 128 * 1024
# A reader asks for the end of the object first; most indexes are in it.
INDEX_GUESS = 32 * 1024

_TRAILER = struct.Struct(">4sI")
_MAGIC = b"PLS1"
_GZIP = 16 + zlib.MAX_WBITS
# Log text compresses nearly as well at the lowest level, at half the cost.
_LEVEL = 1

_FILTER_BITS_PER_TASK = 10
_FILTER_HASHES = 4
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a segment.

    Attributes:
        offset: its first byte in the object.
        length: its compressed bytes.
        first_task, last_task: the tasks in it are between these ids.
        run: the only run in it; None for several.
        first, following: with a single run, its lines.
    """

    offset: int
    length: int
    first_task: int
    last_task: int
    run: RunId | None = None
    first: int = 0
    following: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """An encoded segment.

    Attributes:
        data: of the object.
        raw_bytes: of its blocks before compression.
        lines: lines in it.
        runs: runs in it.
        begin_ms, end_ms: the moments of its records lie between these, and so do those of its lines
            which are before them. A later line has a wrong clock: it must not keep the segment.
        filter: of its tasks.
    """

    data: bytes
    raw_bytes: int
    lines: int
    runs: int
    begin_ms: int
    end_ms: int
    filter: bytes


def encode(
    chunks: Iterable[Chunk], encode_chunk: Callable[[Chunk], bytes], moments: Iterable[int]
) -> Segment:
    """The segment of chunks.

    Args:
        chunks: those of a run in order of their lines, without repetition.
        encode_chunk: a chunk as one line of text, without its line feed.
        moments: of the records that brought them, in milliseconds since 1970; at least one. A chunk
            with only the end of a run has no line and so no moment of its own.
    """
    # Sorting is stable, so the chunks of a run keep their order.
    ordered = merged(sorted(chunks, key=lambda chunk: chunk.run))
    blocks: list[Block] = []
    parts: list[bytes] = []
    offset = raw_bytes = 0
    for group in _groups(ordered):
        raw = b"".join(encode_chunk(chunk) + b"\n" for chunk in group)
        data = _compressed(raw)
        runs = {chunk.run for chunk in group}
        alone = group[0].run if len(runs) == 1 else None
        blocks.append(
            Block(
                offset,
                len(data),
                group[0].run.task_id,
                group[-1].run.task_id,
                alone,
                group[0].first if alone else 0,
                group[-1].following if alone else 0,
            )
        )
        parts.append(data)
        offset += len(data)
        raw_bytes += len(raw)
    index = _compressed(json.dumps([_block_to_wire(block) for block in blocks]).encode())
    parts += [index, _TRAILER.pack(_MAGIC, len(index))]
    of_records = [*moments]
    of_lines = [line[0] for chunk in ordered for line in (*chunk.lines[:1], *chunk.lines[-1:])]
    return Segment(
        b"".join(parts),
        raw_bytes,
        sum(len(chunk.lines) for chunk in ordered),
        len({chunk.run for chunk in ordered}),
        min(of_lines + of_records),
        max(of_records),
        task_filter({chunk.run.task_id for chunk in ordered}),
    )


def _groups(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks by block; a long one is divided."""
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        for part in _divided(chunk):
            part_size = _size_of(part)
            if group and size + part_size > BLOCK_BYTES:
                yield group
                group, size = [], 0
            group.append(part)
            size += part_size
    if group:
        yield group


def _divided(chunk: Chunk) -> Iterator[Chunk]:
    size = begin = 0
    for index, line in enumerate(chunk.lines):
        size += len(line[3]) + 40
        if size >= BLOCK_BYTES and index + 1 < len(chunk.lines):
            yield Chunk(chunk.run, chunk.worker, chunk.first + begin, chunk.lines[begin : index + 1])
            begin, size = index + 1, 0
    rest = chunk.lines[begin:] if begin else chunk.lines
    yield Chunk(chunk.run, chunk.worker, chunk.first + begin, rest, chunk.end)


def _size_of(chunk: Chunk) -> int:
    return 150 + sum(len(line[3]) + 40 for line in chunk.lines)


def index_range(tail: bytes, size: int) -> tuple[int, int]:
    """Where the index of a segment is: its first byte, and its length.

    Args:
        tail: the last bytes of the object, at least eight.
        size: of the object.

    Raises:
        CorruptObject: the object is no segment.
    """
    if len(tail) < _TRAILER.size:
        raise CorruptObject("the object is too short for a segment")
    magic, length = _TRAILER.unpack(tail[-_TRAILER.size :])
    begin = size - _TRAILER.size - length
    if magic != _MAGIC or begin < 0:
        raise CorruptObject("the object is no segment of task logs")
    return begin, length


def decode_index(data: bytes) -> list[Block]:
    """The blocks of a segment, from the bytes of its index.

    Raises:
        CorruptObject: they are no index.
    """
    try:
        return [_block_from_wire(raw) for raw in json.loads(decompressed(data))]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"the index of a segment cannot be read: {error!r}") from error


def blocks_of(blocks: Sequence[Block], task_id: int) -> list[Block]:
    """The blocks that may have lines of a task."""
    return [block for block in blocks if block.first_task <= task_id <= block.last_task]


def decompressed(data: bytes, most: int = 64 * 1024 * 1024) -> bytes:
    """The content of a block or an index.

    Raises:
        CorruptObject: it is damaged, or expands beyond `most` bytes.
    """
    inflator = zlib.decompressobj(_GZIP)
    try:
        raw = inflator.decompress(data, most)
    except zlib.error as error:
        raise CorruptObject(f"a block of a segment is damaged: {error}") from error
    if not inflator.eof:
        raise CorruptObject("a block of a segment is incomplete or too large")
    return raw


def task_filter(task_ids: Iterable[int]) -> bytes:
    """A Bloom filter of tasks; one task in a hundred is found without being in it."""
    ids = set(task_ids)
    filter_ = bytearray(max(8, (len(ids) * _FILTER_BITS_PER_TASK + 7) // 8))
    bits = len(filter_) * 8
    for task_id in ids:
        for value in filter_hashes(task_id):
            bit = value % bits
            filter_[bit >> 3] |= 1 << (bit & 7)
    return bytes(filter_)


def filter_hashes(task_id: int) -> tuple[int, ...]:
    """The hashes of a task, each below 2^31; modulo the bits of a filter they are its bits."""
    # The finalizer of SplitMix64: ids that follow each other need hashes that do not.
    mixed = (task_id + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    first, step = mixed & 0x7FFFFFFF, (mixed >> 32) & 0x7FFFFFFF
    return tuple((first + number * step) & 0x7FFFFFFF for number in range(_FILTER_HASHES))


def _compressed(raw: bytes) -> bytes:
    deflator = zlib.compressobj(_LEVEL, wbits=_GZIP)
    return deflator.compress(raw) + deflator.flush()


def _block_to_wire(block: Block) -> list[object]:
    place: list[object] = [block.offset, block.length, block.first_task, block.last_task]
    return place if block.run is None else [*place, *block.run[1:], block.first, block.following]


def _block_from_wire(raw: list[object]) -> Block:
    offset, length, first_task, last_task, *rest = raw
    place = (_int(offset), _int(length), _int(first_task), _int(last_task))
    if not rest:
        return Block(*place)
    step, attempt, run, first, following = rest
    return Block(*place, RunId(place[2], _int(step), _int(attempt), str(run)), _int(first), _int(following))


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value
