"""Tables on a narrow terminal."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli import output

WORD = st.text("abcdefghij0123456789-", min_size=1, max_size=60)


def printed(monkeypatch: pytest.MonkeyPatch, width: int, headers: list[str], rows: list[list[str]]) -> str:
    screen = io.StringIO()
    monkeypatch.setattr(
        output, "console", lambda: Console(file=screen, width=width, soft_wrap=True, highlight=False)
    )
    output.table(headers, rows)
    return screen.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_ids_stay_whole_and_nothing_is_lost(width: int) -> None:
    """O8: at 80 columns an id can be copied, and the other cells are wrapped, not cut."""

    # Without shrinking, which would print thousands of tables.
    @settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        st.lists(
            st.tuples(st.integers(1, 2**63 - 1).map(str), WORD, WORD, WORD, WORD), min_size=1, max_size=4
        )
    )
    def check(rows: list[tuple[str, ...]]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            text = printed(
                patch, width, ["id", "type", "worker", "labels", "error"], [list(row) for row in rows]
            )
        for task_id, _type, worker, *_rest in rows:
            assert re.search(rf"(?<!\S){task_id}(?!\S)", text), text
            assert re.search(rf"(?<!\S){re.escape(worker)}(?!\S)", text), text
        # Wrapped cells have all their characters.
        letters = sorted("".join(text.split()))
        heads = "idtypeworkerlabelserror"
        assert letters == sorted(heads + "".join("".join(row) for row in rows))

    check()


def test_a_table_that_fits_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: short rows are printed on one line each."""
    rows = [["7300001", "media", "succeeded", "x" * 60]]
    lines = printed(monkeypatch, 80, ["id", "type", "state", "error"], rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("7300001")
    assert len(lines) > 2


def test_words_stay_whole_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: a list of tasks at 80 columns has states, stages and days that can be read."""
    row = [
        "28297196032566",
        "order",
        "succeeded",
        "reserve",
        "0",
        "MEDIUM",
        "2026-11-24 12:18:56 +00:00",
        "a=b",
    ]
    heads = ["id", "type", "state", "stage", "attempt", "priority", "created", "labels", "error"]
    text = printed(monkeypatch, 80, heads, [[*row, "NoHandler: this worker has no handler for the stage"]])
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "28297196032566",
        "order",
        "succeeded",
        "reserve",
        "MEDIUM",
        "2026-11-24",
        "12:18:56",
        "NoHandler:",
    ):
        assert re.search(rf"(?<!\S){word}(?!\S)", text), text
