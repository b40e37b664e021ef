"""The targets a process knows: loaded, read again, forgotten; PostgreSQL is played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.waiting import wait_until

from penstock.callbacks import targets
from penstock.callbacks.known import Attempt, Known, Target
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.core.health import Vitals
from penstock.core.target import TargetId
from penstock.postgres.targets import Kept

SETTINGS = CallbacksSettings()
_TARGETS = st.builds(
    TargetId, st.sampled_from(["acme", "beta"]), st.sampled_from([f"http://t{n}/" for n in range(4)])
)


def at(url: str, namespace: str = "default") -> TargetId:
    return TargetId(namespace, url)


def kept(target: TargetId, **given: Any) -> Kept:
    return Kept(target=target, vitals=Vitals(), **given)


class Rows:
    """What `targets.own` reads; the test says when each reading ends, and what was read."""

    def __init__(self) -> None:
        self.disabled: set[TargetId] = set()
        self.readings: list[list[TargetId]] = []
        self.go_on: asyncio.Event | None = None
        self.written: list[list[TargetId]] = []
        # Whose snapshots somebody else's word was before.
        self.lost: set[TargetId] = set()

    async def keep(self, _pool: Any, snapshots: Sequence[Kept], _owner: str) -> set[TargetId]:
        self.written.append([kept.target for kept in snapshots])
        return set(self.written[-1]) - self.lost

    async def troubled(self, _pool: Any) -> list[TargetId]:
        return []

    async def own(self, _pool: Any, wanted: Sequence[TargetId], _owner: str) -> list[Kept]:
        self.readings.append(list(wanted))
        found = [kept(target, disabled=target in self.disabled) for target in wanted]
        if self.go_on is not None:
            await self.go_on.wait()
        return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    made = Rows()
    monkeypatch.setattr(targets.targets, "own", made.own)
    monkeypatch.setattr(targets.targets, "keep", made.keep)
    monkeypatch.setattr(targets.targets, "troubled", made.troubled)
    return made


def targets_of(
    in_hand: Callable[[TargetId], bool] = lambda _target: False,
    changed: Callable[[TargetId], None] = lambda _target: None,
) -> Targets:
    made = Targets(
        SETTINGS,
        None,  # type: ignore[arg-type]  # nothing here reaches PostgreSQL
        "me",
        partition_of=lambda _url: 0,
        room=lambda: 100,
        waiting=lambda _target: 0,
        changed=changed,
        in_hand=in_hand,
    )
    made.assigned([0])
    return made


async def test_what_changes_while_it_is_loaded_is_read_again(rows: Rows) -> None:
    """C8: an operator's word that comes between the reading and its end counts, for the one it is said of."""
    known = targets_of()
    rows.go_on = asyncio.Event()
    loading = asyncio.create_task(known.load({at("http://a/"): 0, at("http://b/"): 0}))
    await asyncio.sleep(0)
    rows.disabled.add(at("http://a/"))
    known.outdated("default http://a/")
    rows.go_on.set()
    await loading
    target = known.get(at("http://a/"))
    assert target is not None
    assert target.disabled
    assert rows.readings == [[at("http://a/"), at("http://b/")], [at("http://a/")]]


async def test_two_loads_of_one_target_at_once_both_hear_what_changes(rows: Rows) -> None:
    """C8: whichever ends last, what it read before the change does not stand."""
    known = targets_of()
    rows.go_on = asyncio.Event()
    loads = [asyncio.create_task(known.load({at("http://a/"): 0})) for _ in range(2)]
    await asyncio.sleep(0)
    rows.disabled.add(at("http://a/"))
    known.outdated("default http://a/")
    rows.go_on.set()
    await asyncio.gather(*loads)
    target = known.get(at("http://a/"))
    assert target is not None
    assert target.disabled
    assert len(rows.readings) == 4


async def test_nothing_in_hand_is_forgotten(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7b: beyond the limit those go that were unused for longest; never one that something in hand waits for, be it of
    the batch that is loaded just now: its records would wait for ever."""
    monkeypatch.setattr(targets, "REMEMBERED", 10)
    in_hand = {at("http://t0/")}
    known = targets_of(in_hand.__contains__)
    for number in range(30):
        await known.load({at(f"http://t{number}/"): 0})
        # Used all the time, though nothing of it is in hand.
        assert known.get(at("http://t1/")) is not None or number < 1
    assert len(known) == 10
    assert {at(f"http://t{number}/") for number in (0, 1, *range(22, 30))} == {
        target for number in range(30) if known.get(target := at(f"http://t{number}/"))
    }
    # A batch larger than all that may be remembered, each of them waited for.
    batch = {at(f"http://b{number}/"): 0 for number in range(25)}
    in_hand.update(batch)
    await known.load(batch)
    assert all(known.get(url) for url in batch)
    assert known.get(at("http://t0/")) is not None
    in_hand.clear()
    for number in range(40, 60):
        await known.load({at(f"http://t{number}/"): 0})
    assert len(known) == 10


async def test_what_is_unwritten_or_counted_is_not_forgotten(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7b: a charge, a disabled target, and one for which something is held stay, whatever comes by."""
    monkeypatch.setattr(targets, "REMEMBERED", 3)
    known = targets_of()
    rows.disabled.add(at("http://disabled/"))
    await known.load({at(f"http://{name}/"): 0 for name in ("charged", "disabled", "held")})
    known.called(at("http://charged/"), slow=True)
    known.holding([at("http://held/")])
    for number in range(20):
        await known.load({at(f"http://t{number}/"): 0})
    assert all(known.get(at(f"http://{name}/")) for name in ("charged", "disabled", "held"))
    # As many as may stay are in use; of the others a few are left until they are looked at.
    assert len(known) <= 6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100), st.integers(1, 50), st.sets(st.integers(0, 99)))
def test_forgetting_looks_at_a_few(count: int, most: int, used: set[int]) -> None:
    """C7b: however many are known and in use, one look asks about no more than it may, and the next goes on from there."""
    known = Known()
    for number in range(count):
        known.put(at(f"t{number}"), Target(kept(at(f"t{number}")), 0, SETTINGS))
    asked: list[TargetId] = []

    def in_use(which: TargetId, _target: Target) -> bool:
        asked.append(which)
        return int(which.url[1:]) in used

    for _ in range(2 * count):
        before = len(asked)
        known.forget(most, 7, in_use)
        assert len(asked) - before <= 7
    left = {number for number in range(count) if at(f"t{number}") in known}
    assert len(left) == max(min(count, most), len(used & set(range(count))))
    assert {number for number in used if number < count} <= left
    # In turn: nobody is asked about twice before all have been.
    assert len(set(asked[: len(left)])) == len(asked[: len(left)])


async def test_what_is_said_of_a_target_is_of_its_namespace_only(rows: Rows) -> None:
    """C8, O5: of two namespaces that call one address an operator's word disables the one it is said of; code that knew no
    namespaces tells nothing by the URL alone."""
    acme, beta = at("http://a/", "acme"), at("http://a/", "beta")
    known = targets_of()
    rows.go_on = asyncio.Event()
    loading = asyncio.create_task(known.load({acme: 0, beta: 0}))
    await asyncio.sleep(0)
    rows.disabled |= {acme, beta}
    known.outdated("acme http://a/")
    known.outdated("http://a/")
    rows.go_on.set()
    await loading
    assert rows.readings == [[acme, beta], [acme]]
    assert [known.get(one).disabled for one in (acme, beta)] == [True, False]  # type: ignore[union-attr]
    known.stop(beta)
    assert known.get(beta).disabled  # type: ignore[union-attr]


async def test_who_is_in_hand_hears_of_a_word_that_its_snapshot_lost_to(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: an operator limits a target just as its snapshot is written, which changes nothing then; its word counts for what
    waits here all the same, although nothing else comes for the target."""
    monkeypatch.setattr(targets, "KEEP_QUIET_EVERY_S", 0.01)
    told: list[TargetId] = []
    which = at("http://a/")
    known = targets_of(lambda _target: True, told.append)
    await known.load({which: 0})
    known.attempted(which, Attempt(1.0, "msg", 1, 5, 200, "the target answered 200"))
    rows.lost.add(which)
    rows.disabled.add(which)
    running = asyncio.create_task(known.run(scheduled))
    await wait_until(lambda: known.get(which) is None, timeout=30)
    known.outdated("default http://a/")
    await wait_until(lambda: told == [which], timeout=30)
    running.cancel()
    await asyncio.wait([running])
    target = known.get(which)
    assert target is not None
    assert target.disabled


async def test_what_is_known_is_read_again_by_the_partition_its_records_came_by(rows: Rows) -> None:
    """C8: the topic has grown since, and an address is another partition's by now; this process still has its records, and hears
    of an operator's word."""
    told: list[TargetId] = []
    which = at("http://a/")
    known = targets_of(changed=told.append)
    known.revoked(frozenset({0}))
    known.assigned([3])
    await known.load({which: 3})
    rows.disabled.add(which)
    running = asyncio.create_task(known.run(scheduled))
    known.outdated("default http://a/")
    await wait_until(lambda: told == [which], timeout=30)
    running.cancel()
    await asyncio.wait([running])
    target = known.get(which)
    assert target is not None
    assert (target.disabled, target.partition) == (True, 3)


async def test_what_a_namespace_meets_is_charged_to_it_alone(rows: Rows) -> None:
    """C3, O5: ten slow calls of one namespace make its target abnormal, and leave the other namespace's at the same address
    quick, uncharged and normal."""
    acme, beta = at("http://a/", "acme"), at("http://a/", "beta")
    known = targets_of()
    await known.load({acme: 0, beta: 0})
    assert [known.called(acme, slow=True) for _ in range(10)] == [False] * 9 + [True]
    assert sorted(known.states()) == ["abnormal", "normal"]
    assert known.is_hanging(acme)
    assert not known.is_hanging(beta)
    assert (known.drain_rate_of(acme), known.drain_rate_of(beta)) == (SETTINGS.drain.rate, None)


async def test_one_address_that_hangs_is_no_trouble_of_ours(rows: Rows) -> None:
    """C4a, O5: called by many namespaces, an address that hangs makes as many targets abnormal at once; this process suspects
    itself for many addresses, not for many namespaces."""
    known = targets_of()
    shared = [at("http://hangs/", f"n{number}") for number in range(200)]
    await known.load(dict.fromkeys(shared, 0) | {at(f"http://t{number}/"): 0 for number in range(30)})
    for target in shared:
        for _ in range(10):
            known.called(target, slow=True)
    assert sorted(known.states()) == ["abnormal"] * 200 + ["normal"] * 30
    assert not known.suspicious
    for number in range(9):
        for _ in range(10):
            known.called(at(f"http://t{number}/"), slow=True)
    assert known.suspicious


async def test_many_are_written_a_few_at_a_time(rows: Rows) -> None:
    """Issue 5, number 1: what is to be shown of a thousand targets holds up no call for as long as all of them take."""
    known = targets_of()
    some = [at(f"http://t{number}/") for number in range(1001)]
    await known.load(dict.fromkeys(some, 0))
    for which in some:
        known.attempted(which, Attempt(1.0, "msg", 1, 5, 200, "the target answered 200"))
    running = asyncio.create_task(known.run(scheduled))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert max(map(len, rows.written)) == targets.KEPT_AT_ONCE
    assert sorted(which for few in rows.written for which in few) == sorted(some)


async def scheduled(_due_in_s: float) -> None:
    raise AssertionError


class KnownMachine(RuleBasedStateMachine):
    """C7b, O5: whatever is loaded, used, dropped, forgotten and moves away, each target is known by itself, and the addresses
    among them are counted exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Known()
        self.model: dict[TargetId, Target] = {}

    @rule(which=_TARGETS, partition=st.integers(0, 2))
    def put(self, which: TargetId, partition: int) -> None:
        self.model[which] = Target(kept(which), partition, SETTINGS)
        self.known.put(which, self.model[which])

    @rule(which=_TARGETS)
    def drop(self, which: TargetId) -> None:
        self.known.drop(which)
        self.model.pop(which, None)

    @rule(which=_TARGETS)
    def use(self, which: TargetId) -> None:
        assert self.known.use(which) is self.model.get(which)

    @rule(partition=st.integers(0, 2))
    def move_away(self, partition: int) -> None:
        self.known.drop_all_of([partition])
        self.model = {one: known for one, known in self.model.items() if known.partition != partition}

    @rule(most=st.integers(0, 8), in_use=st.sets(_TARGETS))
    def forget(self, most: int, in_use: set[TargetId]) -> None:
        self.known.forget(most, 4, lambda target, _known: target in in_use)
        gone = {one for one in self.model if one not in self.known}
        assert not gone & in_use
        self.model = {one: known for one, known in self.model.items() if one not in gone}

    @invariant()
    def is_exact(self) -> None:
        assert len(self.known) == len(self.model)
        assert all(self.known.get(one) is known for one, known in self.model.items())
        assert self.known.addresses == len({target.url for target in self.model})


KnownMachine.TestCase.settings = settings(deadline=None, max_examples=50)
TestKnown = KnownMachine.TestCase


def test_what_was_met_last_is_shown_although_somebody_has_decided_otherwise() -> None:
    """C8: a target is read again when it was disabled, by its own 410 or by an operator; attempts that were not kept yet stay
    in what is shown of it, once each."""
    which = at("http://t0/")

    def attempt(at_s: float) -> Attempt:
        return Attempt(at_s, "msg_1", 1, 5, 410, "the target answered 410")

    first = Target(kept(which, attempts=[attempt(1.0)._asdict()]), 0, SETTINGS)
    known = Known()
    known.put(which, first)
    first.attempts.append(attempt(2.0))
    again = Target(kept(which, attempts=[attempt(1.0)._asdict()], disabled=True), 0, SETTINGS)
    known.put(which, again)
    assert [one.at_s for one in again.attempts] == [1.0, 2.0]
    by_another = Target(kept(which, attempts=[attempt(3.0)._asdict()]), 0, SETTINGS)
    known.put(which, by_another)
    assert [one.at_s for one in by_another.attempts] == [3.0]
