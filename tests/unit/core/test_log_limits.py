"""The bounds of a run's log: what is dropped is counted by a mark at its place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.task_log import encode_json
from penstock.core.log_chunk import PLATFORM_SOURCE
from penstock.core.log_limits import (
    BURST_S,
    HEAD_BYTES,
    LINE_BYTES,
    LINE_OVERHEAD,
    LINES_PER_S,
    TAIL_BYTES,
    Dropped,
    RunBuffer,
    cut,
    dropped_by,
    mark,
)

MANY = 10**12


def line(text, at_ms=0):
    return (at_ms, 20, "stdout", text)


def is_mark(found):
    return found[2] == PLATFORM_SOURCE


def dropped(lines):
    return sum(found[4]["dropped_lines"] for found in lines if is_mark(found) and len(found) > 4)


def take_all(buffer, now_ms=0):
    first, lines = buffer.take(MANY, now_ms)
    while buffer:
        lines += buffer.take(MANY, now_ms)[1]
    return first, lines


def test_lines_are_numbered_from_zero_without_gaps():
    buffer = RunBuffer(0.0)
    for n in range(5):
        buffer.add(0.0, line(f"{n}"))
    assert buffer.take(2 * (1 + LINE_OVERHEAD), 0) == (0, [line("0"), line("1")])
    buffer.add(0.0, line("5"))
    assert buffer.take(MANY, 0) == (2, [line(f"{n}") for n in range(2, 6)])
    assert (buffer.size_bytes, buffer.ready_bytes, bool(buffer)) == (0, 0, False)


def test_too_many_lines_a_second_leave_a_mark():
    """L: 1,000 lines a second for each run; the mark says how many lines are missing."""
    buffer = RunBuffer(0.0)
    burst = int(LINES_PER_S * BURST_S)
    for n in range(burst + 500):
        buffer.add(0.0, line(f"{n}"))
    buffer.add(1.0, line("later"))
    _first, lines = take_all(buffer)
    assert [found[3] for found in lines[:burst]] == [f"{n}" for n in range(burst)]
    assert is_mark(lines[burst])
    assert lines[burst][4] == {
        "dropped_lines": 500,
        "dropped_bytes": 500 * 5,
        "reason": "rate",
    }
    assert "500 lines" in lines[burst][3]
    assert lines[burst + 1 :] == [line("later")]


def test_a_mark_needs_no_further_line():
    buffer = RunBuffer(0.0)
    for n in range(int(LINES_PER_S * BURST_S) + 3):
        buffer.add(0.0, line(f"{n}"))
    assert dropped(take_all(buffer, 9)[1]) == 3


def test_a_long_log_keeps_its_beginning_and_its_end():
    """L: 10 MiB for each attempt: the first 8, the last 2, and a mark between them."""
    buffer = RunBuffer(0.0)
    text = "x" * 10_000
    count = 3 * (HEAD_BYTES + TAIL_BYTES) // 10_000
    lines = []
    for n in range(count):
        buffer.add(float(n), line(f"{n:06}{text}"))
        if n % 50 == 0:
            lines += take_all(buffer)[1]
        assert buffer.size_bytes <= TAIL_BYTES + 60 * 11_000
    buffer.end(0)
    lines += take_all(buffer)[1]
    kept = [int(found[3][:6]) for found in lines if not is_mark(found)]
    marks = [found for found in lines if is_mark(found)]
    middle = next(i for i, n in enumerate(kept) if n != i)
    assert kept[:middle] == list(range(middle))
    assert kept[middle:] == list(range(kept[middle], count))
    assert HEAD_BYTES * 0.99 < middle * 10_046 <= HEAD_BYTES
    assert TAIL_BYTES * 0.99 < (count - kept[middle]) * 10_046 <= TAIL_BYTES
    assert "exceeds 8 MiB" in marks[0][3]
    assert dropped(marks) == kept[middle] - middle
    assert buffer.size_bytes == 0


@given(st.text())
def test_a_line_has_a_bound_in_bytes(text):
    """L: 16 KiB a line; a short line stays as it is."""
    assert cut(text) == text
    long = (text or "ü") * (LINE_BYTES // max(1, len(text.encode("utf-8", "backslashreplace"))) + 2)
    found = cut(long)
    assert len(found.encode("utf-8", "backslashreplace")) <= LINE_BYTES
    assert "more bytes are not kept" in found


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3000)),
            st.tuples(st.just("take"), st.integers(1, 5000)),
            st.tuples(st.just("drop"), st.integers(1, 5000)),
        ),
        max_size=60,
    )
)
def test_every_line_is_kept_or_counted(steps):
    """Whatever is dropped, the kept lines are in order, and the marks count all others."""
    buffer = RunBuffer(0.0)
    added, taken, following = 0, [], 0
    for n, (what, size) in enumerate(steps):
        if what == "add":
            buffer.add(float(n), line(f"{added:05}" + "x" * size))
            added += 1
        elif what == "drop":
            buffer.drop_oldest(size, n)
        else:
            first, lines = buffer.take(size, n)
            assert first == following
            following += len(lines)
            taken += lines
        assert buffer.size_bytes >= buffer.ready_bytes >= 0
    buffer.end(0)
    taken += take_all(buffer)[1]
    kept = [int(found[3][:5]) for found in taken if not is_mark(found)]
    assert kept == sorted(set(kept))
    assert len(kept) + dropped(taken) == added
    assert buffer.size_bytes == 0


@pytest.mark.parametrize("length", [1, 2_730, 2_731, 4_096, LINE_BYTES])
def test_lone_surrogates_stay_within_the_bound_of_the_schema(length):
    """L: the encoding escapes them; a longer line would spoil the record, with other runs in it."""
    text = cut("\udc80" * length)
    encoded = json.loads(encode_json({"text": text}))["text"]
    assert len(encoded) <= LINE_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dropped_lines": 1},
        {"dropped_lines": "1", "dropped_bytes": 2, "reason": "rate"},
        {"dropped_lines": -1, "dropped_bytes": 2, "reason": "rate"},
        {"dropped_lines": 1, "dropped_bytes": 2, "reason": ["rate"]},
    ],
)
def test_a_handlers_line_is_no_mark(fields):
    """L: a handler may log by a logger of the name `penstock`, with any fields."""
    assert dropped_by((0, 30, PLATFORM_SOURCE, "text", fields)) is None


def test_a_mark_is_read_back():
    found = mark(0, "size", Dropped(3, 40))
    assert dropped_by(found) == Dropped(3, 40)
    assert dropped_by((0, 30, PLATFORM_SOURCE, "text")) is None
