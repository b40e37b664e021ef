"""The slots of slow calls."""

from penstock.callbacks.hosts import Hosts
from penstock.callbacks.router import SlowPool
from penstock.callbacks.settings import SLOW_TARGET_SLOTS, CallbacksSettings
from penstock.callbacks.target_cache import TargetCache
from penstock.core.target import TargetId


def pool_of(slots: int) -> SlowPool:
    settings = CallbacksSettings(callback_slots=round(slots / 0.4))
    assert settings.slow_slots == slots
    return SlowPool(settings, TargetCache(settings, Hosts(settings)))


def test_the_slow_pool_is_bounded_in_total_and_per_target() -> None:
    """C7a: a call that finds no room keeps its slot in the lane."""
    pool = pool_of(10)
    a, b = TargetId("n", "http://a/"), TargetId("n", "http://b/")
    first, *others = [pool.enter(a) for _ in range(SLOW_TARGET_SLOTS)]
    assert first
    assert all(others)
    assert not pool.enter(a)
    # Both names stand for one unknown server, which has no more room.
    assert not pool.enter(b)
    pool.leave(first)
    assert pool.enter(b)
    assert pool.calls_to(a) == SLOW_TARGET_SLOTS - 1
    assert pool.calls_to(b) == 1
    assert len(pool) == SLOW_TARGET_SLOTS


def test_the_slow_pool_is_bounded_per_host_and_per_server() -> None:
    """C5: the targets of a host share its places, and the ports of a server share more."""
    pool = pool_of(200)
    assert sum(bool(pool.enter(TargetId("n", f"http://192.0.2.1/{n}"))) for n in range(100)) == 25
    assert sum(bool(pool.enter(TargetId("n", f"http://192.0.2.1:{n}/"))) for n in range(1, 100)) == 25
    assert sum(bool(pool.enter(TargetId("n", f"http://192.0.2.{n}/"))) for n in range(2, 100)) == 98


def test_the_slow_pool_is_bounded_per_namespace() -> None:
    """C5, O5: slow calls of one namespace leave places for the next."""
    pool = pool_of(200)
    assert sum(bool(pool.enter(TargetId("acme", f"http://192.0.2.{n}/"))) for n in range(250)) == 175
    assert sum(bool(pool.enter(TargetId("beta", f"http://198.51.100.{n}/"))) for n in range(250)) == 21
    assert pool.enter(TargetId("gamma", "http://203.0.113.1/"))
