"""Rows of targets that say nothing any more go; all others stay."""

from __future__ import annotations

import pytest
from tests.callback_targets import Bench
from tests.waiting import wait_until

from penstock.callbacks import forgetting
from penstock.core.target import TargetId
from penstock.postgres import targets
from penstock.postgres.session import open_session

DAYS = 86_400.0


async def _fill(platform: Bench) -> None:
    """Two that may go, and one of each kind that may not, as two namespaces call them; all others are eight days old."""
    await platform.connection.execute(
        "INSERT INTO callback_target (namespace, url, state, count, rate, called_at, changed_at) "
        "SELECT namespace, 'https://' || name || '.example/', state, count, rate, now() - called * interval '1 day', "
        "now() - changed * interval '1 day' FROM (VALUES "
        "('quiet', 'normal', 0, NULL, 8, 8), ('never-called', 'normal', 0, NULL, NULL, 8), "
        "('abnormal', 'abnormal', 10, NULL, 8, 8), ('disabled', 'disabled', 0, NULL, 8, 8), "
        "('limited', 'normal', 0, 5.0, 8, 8), ('charged', 'normal', 1, NULL, 8, 8), "
        "('called', 'normal', 0, NULL, 6, 8), ('changed', 'normal', 0, NULL, 8, 6)"
        ") AS i (name, state, count, rate, called, changed), (VALUES ('acme'), ('default')) AS n (namespace)"
    )


async def _names(platform: Bench) -> set[str]:
    rows = await platform.connection.fetch("SELECT url FROM callback_target")
    return {row["url"].removeprefix("https://").removesuffix(".example/") for row in rows}


STAY = {"abnormal", "disabled", "limited", "charged", "called", "changed"}


async def test_quiet_targets_are_forgotten_a_few_at_a_time(platform: Bench) -> None:
    """C8: every row is looked at once, whatever is taken out; only what says nothing goes, and the end begins anew."""
    await _fill(platform)
    async with open_session(platform.postgres, "test") as session:
        behind: TargetId | None = None
        counts = []
        while not counts or behind is not None:
            forgotten, behind = await targets.forget(session, behind, most=3, quiet_s=7 * DAYS)
            counts.append(forgotten)
            assert len(counts) < 8
        assert len(counts) == 6
        assert sum(counts) == 4
        assert await _names(platform) == STAY
        assert await targets.forget(session, None, most=100, quiet_s=7 * DAYS) == (0, None)


async def test_what_somebody_writes_just_now_is_not_waited_for(platform: Bench) -> None:
    """C5: an operator's transaction on a quiet row keeps the releaser from nothing, and its word counts."""
    await _fill(platform)
    async with open_session(platform.postgres, "test") as session:
        async with platform.connection.transaction():
            await targets.limit(platform.connection, TargetId("default", "https://quiet.example/"), 3.0)
            assert await targets.forget(session, None, most=100, quiet_s=7 * DAYS) == (3, None)
        assert await targets.forget(session, None, most=100, quiet_s=7 * DAYS) == (0, None)
    assert await _names(platform) == STAY | {"quiet"}


async def test_the_service_forgets_quiet_targets(platform: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: with nothing to release, too; the one that has the lock goes through all of them, page after page."""
    monkeypatch.setattr(forgetting, "LOOKED_AT", 2)
    monkeypatch.setattr(forgetting, "EVERY_S", 0.0)
    monkeypatch.setattr("penstock.callbacks.releaser.LONGEST_SLEEP_S", 0.1)
    await _fill(platform)

    async def only_those_stay() -> bool:
        return await _names(platform) == STAY

    # The abnormal one decays: nobody has called it for days.
    async with platform.service(callback_decay_s=0.0):
        await wait_until(only_those_stay)
