"""Segments: what was encoded is found again, by task, block by block."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contracts.task_log import chunk_from_wire, encode_chunk
from penstock.core.log_chunk import Chunk, RunId
from penstock.core.log_segment import (
    BLOCK_BYTES,
    blocks_of,
    decode_index,
    decompressed,
    encode,
    filter_hashes,
    index_range,
    task_filter,
)
from penstock.errors import CorruptObject

# Of the record that brought the chunks.
MOMENT = 1_785_312_000_000


def chunk(task, first, count, run="a", size=20):
    lines = [[n, 20, "stdout", f"{task}/{run}/{n} " + "x" * size] for n in range(first, first + count)]
    return Chunk(RunId(task, 0, 0, run), "w", first, lines)


def may_have(filter_, task_id):
    """As `task_logs.find` decides it in PostgreSQL."""
    found = (value % (len(filter_) * 8) for value in filter_hashes(task_id))
    return all(filter_[bit >> 3] & (1 << (bit & 7)) for bit in found)


def read(segment, task):
    """All lines of a task, as a reader of ranges finds them."""
    data = segment.data
    begin, length = index_range(data[-100:], len(data))
    found = []
    for block in blocks_of(decode_index(data[begin : begin + length]), task):
        raw = decompressed(data[block.offset : block.offset + block.length])
        chunks = [chunk_from_wire(json.loads(line)) for line in raw.splitlines()]
        if block.run is not None:
            assert {each.run for each in chunks} == {block.run}
            assert (chunks[0].first, chunks[-1].following) == (block.first, block.following)
        found += [each for each in chunks if each.run.task_id == task]
    return found


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from("ab"), st.integers(1, 40), st.integers(0, 9000)),
        max_size=40,
    )
)
def test_every_line_is_found_by_its_task(parts):
    """L2: a segment returns the lines of each run in order, and none of another task."""
    following, chunks = {}, []
    for task, run, count, size in parts:
        first = following.get((task, run), 0)
        chunks.append(chunk(task, first, count, run, size))
        following[task, run] = first + count
    segment = encode(chunks, encode_chunk, [MOMENT])
    for task in range(1, 14):
        for run in "ab":
            lines = [line for each in read(segment, task) if each.run.run == run for line in each.lines]
            assert lines == [
                line for each in chunks if each.run[:1] + each.run[3:] == (task, run) for line in each.lines
            ]
    assert segment.lines == sum(following.values())
    assert segment.runs == len(following)
    assert all(may_have(segment.filter, task) for task, _run in following)


def test_a_chunk_without_lines_has_the_moment_of_its_record():
    """L2: it has the end of a run, which a reader finds by the time of its attempt."""
    end = Chunk(RunId(1, 0, 0, "a"), "w", 5, [], "done")
    alone = encode([end], encode_chunk, [MOMENT])
    assert (alone.begin_ms, alone.end_ms) == (MOMENT, MOMENT)
    both = encode([chunk(2, 7, 2), end], encode_chunk, [MOMENT, MOMENT + 1])
    assert (both.begin_ms, both.end_ms) == (7, MOMENT + 1)


def test_a_block_is_bounded_and_the_object_is_gzip():
    """A reader decompresses a block at a time; `gzip -dc` shows a segment."""
    segment = encode(
        [chunk(5, 0, 3000, size=300), *(chunk(n, 0, 2) for n in range(6, 2000))], encode_chunk, [MOMENT]
    )
    begin, length = index_range(segment.data[-8:], len(segment.data))
    blocks = decode_index(segment.data[begin : begin + length])
    raw = [decompressed(segment.data[b.offset : b.offset + b.length]) for b in blocks]
    assert max(map(len, raw)) < 2 * BLOCK_BYTES
    assert sum(map(len, raw)) == segment.raw_bytes
    assert gzip.decompress(segment.data[:-8]).startswith(b"".join(raw))
    assert len(blocks_of(blocks, 1000)) == 1


@given(st.sets(st.integers(1, 2**63 - 1), min_size=1, max_size=300), st.integers(1, 2**63 - 1))
def test_a_filter_never_hides_a_task(tasks, other):
    found = task_filter(tasks)
    assert all(may_have(found, task) for task in tasks)
    assert all(0 <= value < 2**31 for value in filter_hashes(other))


def test_a_filter_finds_few_other_tasks():
    found = task_filter(range(1, 20_001))
    others = sum(may_have(found, task) for task in range(1_000_000, 1_010_000))
    assert others < 300


@pytest.mark.parametrize("damage", ["short", "other", "cut", "bits"])
def test_a_damaged_segment_is_refused(damage):
    """Fails closed: damaged bytes are an error, never lines."""
    data = encode([chunk(1, 0, 100)], encode_chunk, [MOMENT]).data
    damaged = {
        "short": data[-3:],
        "other": b"x" * 100,
        "cut": data[:-30] + data[-8:],
        "bits": data[:-40] + bytes(20) + data[-20:],
    }[damage]

    def read_index():
        begin, length = index_range(damaged[-8:], len(damaged))
        return decode_index(damaged[begin : begin + length])

    with pytest.raises(CorruptObject):
        read_index()


@pytest.mark.parametrize("at_ms", [MOMENT * 1_000, 2**53 - 1])
def test_a_wrong_clock_keeps_no_segment(at_ms):
    """L2: a line in microseconds does not delay the retention of other lines."""
    wrong = Chunk(RunId(1, 0, 0, "a"), "w", 0, [[at_ms, 20, "stdout", "x"]])
    alone = encode([wrong], encode_chunk, [MOMENT])
    assert (alone.begin_ms, alone.end_ms) == (MOMENT, MOMENT)
