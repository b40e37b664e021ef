"""Chunks of task logs: whatever is repeated, cut or lost, each line comes once and in order."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.log_chunk import Chunk, Gap, RunCursors, RunId, merged

RUN = RunId(7, 0, 1, "a")


def chunk(first, count, run=RUN, end=None):
    return Chunk(
        run, "w", first, [(n, 20, "stdout", f"{run.run}{n}") for n in range(first, first + count)], end
    )


def numbers(found):
    return [n for each in found if isinstance(each, Chunk) for n in range(each.first, each.following)]


def read(cursors, chunks):
    return [each for one in chunks for each in cursors.take(one)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=30))
def test_any_chunks_give_each_line_at_most_once_and_in_order(places):
    """L2: repeated and overlapping chunks add no line twice, none out of order, and every line
    that is missing is in a gap."""
    found = read(RunCursors(), [chunk(first, count) for first, count in places])
    seen = numbers(found)
    assert seen == sorted(set(seen))
    missing = {n for each in found if isinstance(each, Gap) for n in range(each.first, each.following)}
    assert missing.isdisjoint(seen)
    assert missing | set(seen) == set(range(max((first + count for first, count in places), default=0)))
    assert all(
        line[3] == f"a{n}"
        for each in found
        if isinstance(each, Chunk)
        for n, line in enumerate(each.lines, each.first)
    )


@given(st.data())
def test_a_repetition_from_any_line_changes_nothing(data):
    """A worker that repeats what Kafka may have is harmless: by (run, first line)."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    chunks, first = [], 0
    for size in sizes:
        chunks.append(chunk(first, size))
        first += size
    chunks[-1] = chunk(chunks[-1].first, len(chunks[-1].lines), end="done")
    again = data.draw(st.lists(st.sampled_from(chunks)))
    # Each repetition comes anywhere behind its first occurrence.
    sent = list(chunks)
    for each in again:
        sent.insert(data.draw(st.integers(sent.index(each) + 1, len(sent))), each)
    found = read(RunCursors(), sent)
    assert numbers(found) == list(range(first))
    assert [each.end for each in found if isinstance(each, Chunk) and each.end] == ["done"]


def test_runs_of_one_attempt_are_apart():
    """Two workers may run one attempt: each run has its own numbers."""
    other = RunId(7, 0, 1, "b")
    cursors = RunCursors({other: 5})
    found = read(cursors, [chunk(0, 2), chunk(5, 2, other), chunk(2, 1)])
    assert [(each.run.run, each.first, each.following) for each in found] == [
        ("a", 0, 2),
        ("b", 5, 7),
        ("a", 2, 3),
    ]
    assert not cursors.ended(RUN)


def test_the_end_of_a_run_is_known_without_lines():
    cursors = RunCursors()
    assert [each.end for each in read(cursors, [chunk(0, 2), chunk(2, 0, end="next")])] == [None, "next"]
    assert cursors.ended(RUN)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4)), max_size=20))
def test_merging_keeps_every_line(parts):
    """Consecutive chunks of a run become one."""
    following = {"a": 0, "b": 0}
    chunks = []
    for name, count in parts:
        chunks.append(chunk(following[name], count, RunId(7, 0, 1, name)))
        following[name] += count
    joined = merged(chunks)
    lines = [line for each in chunks for line in each.lines]
    assert [line for each in joined for line in each.lines] == lines
    assert all(before.run != after.run for before, after in itertools.pairwise(joined))
