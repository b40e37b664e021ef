"""Targets in memory: loaded, read again, evicted, saved. The test plays PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.waiting import wait_until

from penstock.callbacks import target_store
from penstock.callbacks.hosts import Hosts
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Attempt, Target
from penstock.callbacks.target_cache import TargetCache
from penstock.callbacks.target_store import TargetStore
from penstock.core.health import HealthSnapshot, HealthWindow
from penstock.core.target import TargetId
from penstock.postgres.targets import FoundTargets, StoredTarget

SETTINGS = CallbacksSettings()
HOST = Hosts(SETTINGS).of(TargetId("default", "http://t/"))
_TARGETS = st.builds(
    TargetId, st.sampled_from(["acme", "beta"]), st.sampled_from([f"http://t{n}/" for n in range(4)])
)


def at(url: str, namespace: str = "default") -> TargetId:
    return TargetId(namespace, url)


def stored(target: TargetId, **fields: Any) -> StoredTarget:
    return StoredTarget(target=target, health=HealthSnapshot(), **fields)


def not_in_flight(_target: TargetId) -> bool:
    return False


class Rows:
    """Rows that the statements read and write; a test decides when a read ends."""

    def __init__(self) -> None:
        self.disabled: set[TargetId] = set()
        self.reads: list[list[TargetId]] = []
        self.read_ends: asyncio.Event | None = None
        self.saved: list[list[TargetId]] = []
        # Targets that were changed by an operator before they are saved.
        self.lost: set[TargetId] = set()
        self.abnormal: list[TargetId] = []
        self.held: list[TargetId] = []
        self.pages = 0

    async def save(self, _pool: Any, snapshots: Sequence[StoredTarget], _owner: str) -> set[TargetId]:
        self.saved.append([snapshot.target for snapshot in snapshots])
        return set(self.saved[-1]) - self.lost

    async def find_abnormal(self, _pool: Any, after: TargetId | None, *, limit: int) -> FoundTargets:
        return self._page(self.abnormal, after, limit)

    async def find_held(self, _pool: Any, after: TargetId | None, *, limit: int) -> FoundTargets:
        return self._page(self.held, after, limit)

    def _page(self, found: list[TargetId], after: TargetId | None, limit: int) -> FoundTargets:
        begin = 0 if after is None else found.index(after) + 1
        page = found[begin : begin + limit]
        self.pages += 1
        return FoundTargets(page, page[-1] if len(page) == limit else None)

    async def take_over(self, _pool: Any, wanted: Sequence[TargetId], _owner: str) -> list[StoredTarget]:
        self.reads.append(list(wanted))
        found = [stored(target, disabled=target in self.disabled) for target in wanted]
        if self.read_ends is not None:
            await self.read_ends.wait()
        return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    made = Rows()
    monkeypatch.setattr(target_store.targets, "take_over", made.take_over)
    monkeypatch.setattr(target_store.targets, "save", made.save)
    monkeypatch.setattr(target_store.targets, "find_abnormal", made.find_abnormal)
    monkeypatch.setattr(target_store.targets, "find_held", made.find_held)
    return made


class Targets:
    """A cache with its store, as the pipeline runs them."""

    def __init__(self, in_flight: Callable[[TargetId], bool] = not_in_flight) -> None:
        self.cache = TargetCache(SETTINGS)
        self.store = TargetStore(
            SETTINGS,
            None,  # type: ignore[arg-type]  # no statement reaches PostgreSQL
            self.cache,
            "me",
            partition_of=lambda _url: 0,
            in_flight=in_flight,
        )
        self.assign(0)
        self.changed: list[TargetId] = []

    def assign(self, partition: int) -> None:
        self.store.assign(frozenset({("callbacks", partition), ("callbacks.diverted", partition)}))

    async def load(self, *targets: TargetId, partition: int = 0) -> None:
        await self.store.load(dict.fromkeys(targets, partition))

    async def maintain(self) -> None:
        try:
            while True:
                await self.store.wait()
                self.changed += await self.store.refresh()
                await self.store.save_due()
                await self.store.find_troubled()
        finally:
            await self.store.save_last()


async def test_two_concurrent_loads_of_one_target_both_see_a_change(rows: Rows) -> None:
    """C8: neither load leaves the state from before the change, whichever ends last."""
    targets = Targets()
    rows.read_ends = asyncio.Event()
    loads = [asyncio.create_task(targets.load(at("http://a/"))) for _ in range(2)]
    await asyncio.sleep(0)
    rows.disabled.add(at("http://a/"))
    targets.store.invalidate("default http://a/")
    rows.read_ends.set()
    await asyncio.gather(*loads)
    target = targets.cache.get(at("http://a/"))
    assert target is not None
    assert target.disabled
    assert len(rows.reads) == 4


async def test_targets_in_flight_are_not_evicted(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7b: beyond the capacity the least recently used targets go, but none with callbacks in
    flight, also of the batch that is being loaded: its records would wait forever."""
    monkeypatch.setattr(target_store, "CAPACITY", 10)
    in_flight = {at("http://t0/")}
    targets = Targets(in_flight.__contains__)
    cache = targets.cache
    for number in range(30):
        await targets.load(at(f"http://t{number}/"))
        # Used all the time, but not in flight.
        assert cache.get(at("http://t1/")) is not None or number < 1
    assert len(cache) == 10
    assert {at(f"http://t{number}/") for number in (0, 1, *range(22, 30))} == {
        target for number in range(30) if cache.get(target := at(f"http://t{number}/"))
    }
    # A batch larger than the capacity, all of it in flight.
    batch = [at(f"http://b{number}/") for number in range(25)]
    in_flight.update(batch)
    await targets.load(*batch)
    assert all(cache.get(target) for target in batch)
    assert cache.get(at("http://t0/")) is not None
    in_flight.clear()
    for number in range(40, 60):
        await targets.load(at(f"http://t{number}/"))
    assert len(cache) == 10


async def test_targets_with_state_are_not_evicted(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7b: a target with a count and one with held callbacks stay. A disabled one leaves, since its
    row has its state."""
    monkeypatch.setattr(target_store, "CAPACITY", 3)
    targets = Targets()
    cache = targets.cache
    rows.disabled.add(at("http://disabled/"))
    await targets.load(*(at(f"http://{name}/") for name in ("slow", "disabled", "held")))
    cache.record_call(at("http://slow/"), slow=True)
    cache.mark_held([at("http://held/")])
    for number in range(20):
        await targets.load(at(f"http://t{number}/"))
    assert all(cache.get(at(f"http://{name}/")) for name in ("slow", "held"))
    assert at("http://disabled/") not in cache
    # The capacity is used up; a few others stay until the scan reaches them.
    assert len(cache) <= 6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100), st.integers(1, 50), st.sets(st.integers(0, 99)))
def test_an_eviction_scans_a_few_targets(count: int, capacity: int, used: set[int]) -> None:
    """C7b: however many targets are cached and in flight, one eviction scans no more than its
    limit, and the next one continues from there."""
    cache = TargetCache(SETTINGS)
    for number in range(count):
        cache.put(at(f"t{number}"), Target(stored(at(f"t{number}")), 0, SETTINGS, HOST))
    asked: list[TargetId] = []

    def in_flight(target_id: TargetId) -> bool:
        asked.append(target_id)
        return int(target_id.url[1:]) in used

    for _ in range(2 * count):
        before = len(asked)
        cache.evict(capacity, 7, in_flight)
        assert len(asked) - before <= 7
    left = {number for number in range(count) if at(f"t{number}") in cache}
    assert len(left) == max(min(count, capacity), len(used & set(range(count))))
    assert {number for number in used if number < count} <= left
    # In turn: no target is scanned twice before all others.
    assert len(set(asked[: len(left)])) == len(asked[: len(left)])


async def test_a_change_applies_to_its_namespace_only(rows: Rows) -> None:
    """C8, O5: two namespaces call one URL, and an operator's change disables the target of one."""
    acme, beta = at("http://a/", "acme"), at("http://a/", "beta")
    targets = Targets()
    rows.read_ends = asyncio.Event()
    loading = asyncio.create_task(targets.load(acme, beta))
    await asyncio.sleep(0)
    rows.disabled |= {acme, beta}
    targets.store.invalidate("acme http://a/")
    rows.read_ends.set()
    await loading
    cache = targets.cache
    assert rows.reads == [[acme, beta], [acme]]
    assert [cache.get(target).disabled for target in (acme, beta)] == [True, False]  # type: ignore[union-attr]
    cache.disable_gone(beta, "410")
    assert cache.get(beta).disabled  # type: ignore[union-attr]


async def test_a_change_that_wins_over_a_save_applies_to_callbacks_in_flight(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: an operator changes a target just before its save, which then changes nothing; the change
    applies to the callbacks that wait here, although no further callback arrives."""
    monkeypatch.setattr(target_store, "SAVE_ATTEMPTS_EVERY_S", 0.01)
    target_id = at("http://a/")
    targets = Targets(lambda _target: True)
    await targets.load(target_id)
    targets.cache.record_attempt(target_id, Attempt(1.0, "msg", 1, 5, 200, "the target answered 200"))
    rows.lost.add(target_id)
    rows.disabled.add(target_id)
    running = asyncio.create_task(targets.maintain())
    await wait_until(lambda: targets.cache.get(target_id) is None)
    targets.cache.record_attempt(target_id, Attempt(2.0, "msg", 2, 5, 410, "the target answered 410"))
    rows.lost.clear()
    targets.store.invalidate("default http://a/")
    await wait_until(lambda: targets.changed == [target_id])
    running.cancel()
    await asyncio.wait([running])
    target = targets.cache.get(target_id)
    assert target is not None
    assert target.disabled
    # Operators see the attempts that were not saved before the change.
    assert [attempt.status for attempt in target.attempts] == [200, 410]
    assert rows.saved[-1] == [target_id]


async def test_a_cached_target_is_read_again_with_the_partition_of_its_records(rows: Rows) -> None:
    """C8: the topic has grown, and new records of the URL go to another partition; this process
    still has its old records, and applies an operator's change to them."""
    target_id = at("http://a/")
    targets = Targets()
    targets.cache.revoke(frozenset({0}))
    targets.assign(3)
    await targets.load(target_id, partition=3)
    rows.disabled.add(target_id)
    running = asyncio.create_task(targets.maintain())
    targets.store.invalidate("default http://a/")
    await wait_until(lambda: targets.changed == [target_id])
    running.cancel()
    await asyncio.wait([running])
    target = targets.cache.get(target_id)
    assert target is not None
    assert (target.disabled, target.partition) == (True, 3)


async def test_slow_calls_count_in_their_namespace_only(rows: Rows) -> None:
    """C3, O5: ten slow calls of one namespace make its target abnormal; the other namespace's
    target at the same URL stays normal and not unresponsive."""
    acme, beta = at("http://a/", "acme"), at("http://a/", "beta")
    targets = Targets()
    cache = targets.cache
    await targets.load(acme, beta)
    assert [cache.record_call(acme, slow=True) for _ in range(10)] == [False] * 9 + [True]
    assert sorted(cache.states()) == ["abnormal", "normal"]
    assert cache.is_unresponsive(acme)
    assert not cache.is_unresponsive(beta)
    assert (cache.drain_rate_of(acme), cache.drain_rate_of(beta)) == (SETTINGS.drain.rate, None)


async def test_one_unresponsive_url_in_many_namespaces_begins_no_self_check(rows: Rows) -> None:
    """C4a, O5: self-check mode begins when many URLs become abnormal at once, not when many
    namespaces call one URL."""
    targets = Targets()
    cache = targets.cache
    shared = [at("http://hangs/", f"n{number}") for number in range(200)]
    await targets.load(*shared, *(at(f"http://t{number}/") for number in range(30)))
    for target in shared:
        for _ in range(10):
            cache.record_call(target, slow=True)
    assert sorted(cache.states()) == ["abnormal"] * 200 + ["normal"] * 30
    assert not cache.in_self_check
    for number in range(9):
        for _ in range(10):
            cache.record_call(at(f"http://t{number}/"), slow=True)
    assert cache.in_self_check


async def test_the_hosts_of_one_namespace_begin_no_self_check(rows: Rows) -> None:
    """C4a: one tenant whose hosts hang cannot end the health of the targets of others; with hosts
    of a second one it is the service's own network."""
    targets = Targets()
    cache = targets.cache
    unresponsive = [at(f"http://a{number}/", "acme") for number in range(15)]
    others = [at(f"http://b{number}/", "beta") for number in range(30)]
    await targets.load(*unresponsive, *others)
    for target in unresponsive:
        for _ in range(10):
            cache.record_call(target, slow=True)
    assert not cache.in_self_check
    for target in others[:10]:
        for _ in range(10):
            cache.record_call(target, slow=True)
    assert cache.in_self_check


async def test_abnormal_targets_stay_abnormal_in_self_check_mode(rows: Rows) -> None:
    """C4a: the service knows nothing about targets meanwhile, so no count decays."""
    targets = Targets()
    cache = targets.cache
    hangs = at("http://hangs/")
    others = [at(f"http://t{number}/") for number in range(12)]
    await targets.load(hangs, *others)
    found = cache.get(hangs)
    assert found is not None
    now_s = time.time()
    found.window = HealthWindow(SETTINGS.health, HealthSnapshot(20, now_s - 50, now_s - 50, abnormal=True))
    for target in others:
        for _ in range(10):
            cache.record_call(target, slow=True)
    assert cache.in_self_check
    # A change of health is saved at once.
    await targets.store.wait()
    await targets.store.save_due()
    # As if it had been called now: the decay begins when the mode has ended.
    called_at_s = found.window.snapshot(time.time()).called_at_s
    assert called_at_s is not None
    assert called_at_s >= now_s


async def test_many_targets_are_saved_in_batches(rows: Rows) -> None:
    """C5: saving a thousand targets blocks no call for the time of all of them."""
    targets = Targets()
    target_ids = [at(f"http://t{number}/") for number in range(1001)]
    await targets.load(*target_ids)
    for target_id in target_ids:
        targets.cache.record_attempt(target_id, Attempt(1.0, "msg", 1, 5, 200, "the target answered 200"))
    await targets.store.save_last()
    assert max(map(len, rows.saved)) == target_store.SAVE_BATCH
    assert sorted(target_id for batch in rows.saved for target_id in batch) == sorted(target_ids)


class CacheMachine(RuleBasedStateMachine):
    """C7b, O5: after any operations each target is cached by its identity, and URLs are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = TargetCache(SETTINGS)
        self.model: dict[TargetId, Target] = {}

    @rule(target_id=_TARGETS, partition=st.integers(0, 2))
    def put(self, target_id: TargetId, partition: int) -> None:
        self.model[target_id] = Target(stored(target_id), partition, SETTINGS, HOST)
        self.cache.put(target_id, self.model[target_id])

    @rule(target_id=_TARGETS)
    def drop(self, target_id: TargetId) -> None:
        self.cache.drop(target_id)
        self.model.pop(target_id, None)

    @rule(target_id=_TARGETS)
    def get(self, target_id: TargetId) -> None:
        assert self.cache.get(target_id) is self.model.get(target_id)

    @rule(partition=st.integers(0, 2))
    def revoke(self, partition: int) -> None:
        self.cache.revoke([partition])
        self.model = {
            target_id: target for target_id, target in self.model.items() if target.partition != partition
        }

    @rule(capacity=st.integers(0, 8), in_flight=st.sets(_TARGETS))
    def evict(self, capacity: int, in_flight: set[TargetId]) -> None:
        self.cache.evict(capacity, 4, in_flight.__contains__)
        evicted = {target_id for target_id in self.model if target_id not in self.cache}
        assert not evicted & in_flight
        self.model = {
            target_id: target for target_id, target in self.model.items() if target_id not in evicted
        }

    @invariant()
    def is_exact(self) -> None:
        assert len(self.cache) == len(self.model)
        assert all(self.cache.peek(target_id) is target for target_id, target in self.model.items())
        assert sum(self.cache._hosts_within.values()) == len(
            {target.host.id for target in self.model.values()}
        )


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=50)
TestCache = CacheMachine.TestCase


def test_attempts_survive_a_reload() -> None:
    """C8: a target is read again after it was disabled, by its own 410 or by an operator; attempts
    that were not saved yet stay visible, once each."""
    target_id = at("http://t0/")

    def attempt(at_s: float) -> Attempt:
        return Attempt(at_s, "msg_1", 1, 5, 410, "the target answered 410")

    first = Target(stored(target_id, attempts=[attempt(1.0)._asdict()]), 0, SETTINGS, HOST)
    cache = TargetCache(SETTINGS)
    cache.put(target_id, first)
    first.attempts.append(attempt(2.0))
    again = Target(stored(target_id, attempts=[attempt(1.0)._asdict()], disabled=True), 0, SETTINGS, HOST)
    cache.put(target_id, again)
    assert [one.at_s for one in again.attempts] == [1.0, 2.0]
    by_another = Target(stored(target_id, attempts=[attempt(3.0)._asdict()]), 0, SETTINGS, HOST)
    cache.put(target_id, by_another)
    assert [one.at_s for one in by_another.attempts] == [3.0]


async def test_disabled_targets_leave_memory_once_they_are_recorded(rows: Rows) -> None:
    """C6: 20,000 URLs that answer 410 take memory until PostgreSQL has their state, not longer."""
    targets = Targets()
    gone = [at(f"http://a/{number}") for number in range(1_200)]
    normal = at("http://a/normal")
    await targets.load(*gone, normal)
    cache = targets.cache
    for target_id in gone:
        cache.disable_gone(target_id, "it answered 410")
        cache.mark_held([target_id])
        cache.mark_queued([target_id])
    assert not cache.held
    assert not cache.queued
    for _ in range(3):
        cache.evict_disabled(0.0, not_in_flight)
    assert len(cache) == 1_201, "the 410 may not be recorded yet"
    cache.disabling.clear()
    cache.record_attempt(gone[0], Attempt(1.0, "msg_1", 1, 5, 410, "the target answered 410"))

    def in_flight(target_id: TargetId) -> bool:
        return target_id == gone[1]

    for _ in range(3):
        cache.evict_disabled(0.0, in_flight)
    assert len(cache) == 1_001
    for _ in range(3):
        cache.evict_disabled(1e9, in_flight)
    assert [one for one in (*gone, normal) if one in cache] == [gone[0], gone[1], normal]


async def test_a_disabled_target_that_is_enabled_stays(rows: Rows) -> None:
    """C6: a target that was enabled is evicted as any normal one, and its callbacks count."""
    targets = Targets()
    rows.disabled.add(at("http://a/"))
    await targets.load(at("http://a/"))
    rows.disabled.clear()
    await targets.load(at("http://a/"))
    targets.cache.evict_disabled(1e9, not_in_flight)
    targets.cache.mark_held([at("http://a/")])
    assert at("http://a/") in targets.cache
    assert list(targets.cache.held) == [at("http://a/")]


async def test_a_search_looks_at_one_full_page_a_tick(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: a search of many troubled targets takes a page a tick, and finds all of them."""
    monkeypatch.setattr(target_store, "SEARCHED", 10)
    targets = Targets()
    rows.abnormal = [at(f"http://abnormal/{number}") for number in range(25)]
    rows.held = [at(f"http://held/{number}") for number in range(15)]
    found = []
    for _ in range(4):
        await targets.store.find_troubled()
        found.append(len(targets.cache.held))
    assert found == [10, 20, 35, 40]
    assert rows.pages == 5
    await targets.store.find_troubled()
    assert rows.pages == 5, "the next search is due in half a minute"
