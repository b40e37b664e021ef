"""The targets a process knows: loaded, read again, forgotten; PostgreSQL is played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.callbacks import targets
from penstock.callbacks.known import Known, Target
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.core.health import Vitals
from penstock.postgres.targets import Kept

SETTINGS = CallbacksSettings()


def kept(url: str, **given: Any) -> Kept:
    return Kept(url=url, vitals=Vitals(), **given)


class Rows:
    """What `targets.own` reads; the test says when each reading ends, and what was read."""

    def __init__(self) -> None:
        self.disabled: set[str] = set()
        self.readings: list[list[str]] = []
        self.go_on: asyncio.Event | None = None

    async def own(self, _pool: Any, urls: Sequence[str], _owner: str) -> list[Kept]:
        self.readings.append(list(urls))
        found = [kept(url, disabled=url in self.disabled) for url in urls]
        if self.go_on is not None:
            await self.go_on.wait()
        return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    made = Rows()
    monkeypatch.setattr(targets.targets, "own", made.own)
    return made


def targets_of(in_hand: Callable[[str], bool] = lambda _url: False) -> Targets:
    made = Targets(
        SETTINGS,
        None,  # type: ignore[arg-type]  # nothing here reaches PostgreSQL
        "me",
        partition_of=lambda _url: 0,
        room=lambda: 100,
        waiting=lambda _url: 0,
        changed=lambda _url: None,
        in_hand=in_hand,
    )
    made.assigned([0])
    return made


async def test_what_changes_while_it_is_loaded_is_read_again(rows: Rows) -> None:
    """C8: an operator's word that comes between the reading and its end counts, for the one it is said of."""
    known = targets_of()
    rows.go_on = asyncio.Event()
    loading = asyncio.create_task(known.load({"http://a/": 0, "http://b/": 0}))
    await asyncio.sleep(0)
    rows.disabled.add("http://a/")
    known.outdated("http://a/")
    rows.go_on.set()
    await loading
    target = known.get("http://a/")
    assert target is not None
    assert target.disabled
    assert rows.readings == [["http://a/", "http://b/"], ["http://a/"]]


async def test_two_loads_of_one_target_at_once_both_hear_what_changes(rows: Rows) -> None:
    """C8: whichever ends last, what it read before the change does not stand."""
    known = targets_of()
    rows.go_on = asyncio.Event()
    loads = [asyncio.create_task(known.load({"http://a/": 0})) for _ in range(2)]
    await asyncio.sleep(0)
    rows.disabled.add("http://a/")
    known.outdated("http://a/")
    rows.go_on.set()
    await asyncio.gather(*loads)
    target = known.get("http://a/")
    assert target is not None
    assert target.disabled
    assert len(rows.readings) == 4


async def test_nothing_in_hand_is_forgotten(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7b: beyond the limit those go that were unused for longest; never one that something in hand waits for, be it of
    the batch that is loaded just now: its records would wait for ever."""
    monkeypatch.setattr(targets, "REMEMBERED", 10)
    in_hand = {"http://t0/"}
    known = targets_of(in_hand.__contains__)
    for number in range(30):
        await known.load({f"http://t{number}/": 0})
        # Used all the time, though nothing of it is in hand.
        assert known.get("http://t1/") is not None or number < 1
    assert len(known) == 10
    assert {f"http://t{number}/" for number in (0, 1, *range(22, 30))} == {
        f"http://t{number}/" for number in range(30) if known.get(f"http://t{number}/")
    }
    # A batch larger than all that may be remembered, each of them waited for.
    batch = {f"http://b{number}/": 0 for number in range(25)}
    in_hand.update(batch)
    await known.load(batch)
    assert all(known.get(url) for url in batch)
    assert known.get("http://t0/") is not None
    in_hand.clear()
    for number in range(40, 60):
        await known.load({f"http://t{number}/": 0})
    assert len(known) == 10


async def test_what_is_unwritten_or_counted_is_not_forgotten(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7b: a charge, a disabled target, and one for which something is held stay, whatever comes by."""
    monkeypatch.setattr(targets, "REMEMBERED", 3)
    known = targets_of()
    rows.disabled.add("http://disabled/")
    await known.load({f"http://{name}/": 0 for name in ("charged", "disabled", "held")})
    known.called("http://charged/", slow=True)
    known.holding(["http://held/"])
    for number in range(20):
        await known.load({f"http://t{number}/": 0})
    assert all(known.get(f"http://{name}/") for name in ("charged", "disabled", "held"))
    # As many as may stay are in use; of the others a few are left until they are looked at.
    assert len(known) <= 6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100), st.integers(1, 50), st.sets(st.integers(0, 99)))
def test_forgetting_looks_at_a_few(count: int, most: int, used: set[int]) -> None:
    """C7b: however many are known and in use, one look asks about no more than it may, and the next goes on from there."""
    known = Known()
    for number in range(count):
        known.put(f"t{number}", Target(kept(f"t{number}"), 0, SETTINGS))
    asked: list[str] = []

    def in_use(url: str, _target: Target) -> bool:
        asked.append(url)
        return int(url[1:]) in used

    for _ in range(2 * count):
        before = len(asked)
        known.forget(most, 7, in_use)
        assert len(asked) - before <= 7
    left = {number for number in range(count) if f"t{number}" in known}
    assert len(left) == max(min(count, most), len(used & set(range(count))))
    assert {number for number in used if number < count} <= left
    # In turn: nobody is asked about twice before all have been.
    assert len(set(asked[: len(left)])) == len(asked[: len(left)])
