"""Totals of runs, and the last lines of a log."""

from __future__ import annotations

from penstock.core import log_view
from penstock.core.log_chunk import Chunk, RunId
from penstock.core.log_view import LastLines, RunSummary, add_summaries, summarize

RUN = RunId(1, 0, 0, "a")


def summary_of(*chunks: Chunk) -> dict[RunId, RunSummary]:
    found: dict[RunId, RunSummary] = {}
    for chunk in chunks:
        summarize(found, chunk)
    return found


def chunk(first: int, *texts: str, end: str | None = None) -> Chunk:
    lines = [(1_000 + first + n, 20, "stdout", text) for n, text in enumerate(texts)]
    return Chunk(RUN, "w", first, list(lines), end)


def test_the_totals_of_segments_add_up() -> None:
    """L2: the sum of the totals of two segments is that of all their chunks. Where they overlap,
    nothing is added, and the chunks must be read."""
    before, after = chunk(0, "a", "bb"), chunk(2, "ccc", end="done")
    found = summary_of(before)
    assert add_summaries(found, [*summary_of(after).values()])
    assert found == summary_of(before, after)
    assert (found[RUN].lines, found[RUN].size_bytes, found[RUN].end) == (3, 6, "done")
    repeated = [*summary_of(chunk(1, "bb", "ccc")).values()]
    assert not add_summaries(found, repeated)
    assert found == summary_of(before, after)


def test_the_last_lines_have_a_bound_of_their_size() -> None:
    """L: a few long lines may be more than a gateway keeps in memory."""
    kept = LastLines[bytes](3, len)
    kept.extend([b"1", b"2", b"3", b"4"])
    long = b"x" * (log_view.LAST_LINES_SIZE - 1)
    assert [*kept.taken()] == [b"2", b"3", b"4"]
    kept.extend([b"1", b"2", long])
    kept.extend([b"3"])
    assert [*kept.taken()] == [long, b"3"]
    assert not kept.taken()
