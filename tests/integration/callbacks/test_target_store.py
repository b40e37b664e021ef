"""The target cleaner deletes rows of unused targets and keeps all others."""

from __future__ import annotations

import pytest
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

from penstock.callbacks import target_store
from penstock.core.target import TargetId
from penstock.postgres import targets
from penstock.postgres.session import open_session

DAYS = 86_400.0


async def _insert_targets(platform: Bench) -> None:
    """Inserts two unused targets and one target of each kind that must stay, for two namespaces.

    Their times are eight days ago, unless a recent time is the reason to stay.
    """
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


async def _target_names(platform: Bench) -> set[str]:
    rows = await platform.connection.fetch("SELECT url FROM callback_target")
    return {row["url"].removeprefix("https://").removesuffix(".example/") for row in rows}


USED = {"abnormal", "disabled", "limited", "charged", "called", "changed"}


async def test_unused_targets_are_deleted_in_pages(platform: Bench) -> None:
    """C8: the pages visit every row once, although rows are deleted on the way.

    Only unused targets are deleted, and the last page resets the cursor.
    """
    await _insert_targets(platform)
    async with open_session(platform.postgres, "test") as session:
        cursor: TargetId | None = None
        counts = []
        while not counts or cursor is not None:
            deleted, cursor = await targets.delete_unused(session, cursor, limit=3, unused_s=7 * DAYS)
            counts.append(deleted)
            assert len(counts) < 8
        assert len(counts) == 6
        assert sum(counts) == 4
        assert await _target_names(platform) == USED
        assert await targets.delete_unused(session, None, limit=100, unused_s=7 * DAYS) == (0, None)


async def test_the_cleaner_skips_locked_rows(platform: Bench) -> None:
    """C5: an open transaction on an unused row does not block the cleaner; its change stays."""
    await _insert_targets(platform)
    async with open_session(platform.postgres, "test") as session:
        async with platform.connection.transaction():
            await targets.limit(platform.connection, TargetId("default", "https://quiet.example/"), 3.0)
            assert await targets.delete_unused(session, None, limit=100, unused_s=7 * DAYS) == (3, None)
        assert await targets.delete_unused(session, None, limit=100, unused_s=7 * DAYS) == (0, None)
    assert await _target_names(platform) == USED | {"quiet"}


async def test_the_service_deletes_unused_targets(platform: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: the replica with the lock cleans all pages, also while no callback is due."""
    monkeypatch.setattr(target_store, "CLEANED_ROWS", 2)
    monkeypatch.setattr(target_store, "CLEAN_EVERY_S", 0.0)
    monkeypatch.setattr("penstock.callbacks.requeuer.LONGEST_SLEEP_S", 0.1)
    await _insert_targets(platform)

    async def only_used_targets_are_left() -> bool:
        return await _target_names(platform) == USED

    # Decay is off, because it would make the idle abnormal target normal and so unused.
    async with platform.service(callback_guards_off=("decay",)):
        await wait_until(only_used_targets_are_left)
