"""The check itself: one look at everything, and with `repair` a second one after what was found is put back."""

from __future__ import annotations

from contextlib import AsyncExitStack

import asyncpg

from penstock.checks import rows
from penstock.checks.kafka import Topics
from penstock.checks.moving import Moving
from penstock.checks.queued import Queued
from penstock.checks.repair import Repair
from penstock.checks.report import Found, Offender, Report, Rule
from penstock.checks.unbegun import Unbegun
from penstock.kafka.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.declared import partitions_of
from penstock.kafka.topics import HEARTBEATS
from penstock.postgres.connection import open_pool, translated
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.settings import Platform

__all__ = ["Offender", "Report", "Rule", "check"]

# How many offenders against one rule are named, when nobody says.
SHOW = 20


async def check(settings: Platform, *, repair: bool = False, show: int = SHOW) -> Report:
    """Checks the invariant on a live system; takes `SETTLE_S` seconds more when something may be on its way.

    Args:
        settings: where.
        repair: put back what is found, and check again.
        show: how many offenders against one rule to name.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it could not be checked, or not all was put back.
    """
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            open_pool(settings.postgres, "check", pooled=settings.pooled, writing=repair, size=2)
        )
        consumer = await stack.enter_async_context(running(make_consumer(settings, None)))
        admin = await stack.enter_async_context(admin_client(settings))
        topics = Topics(settings, admin, consumer)
        report = Report()
        with translated():
            states = await pool.fetch(query("checks.states"))
            callback_states = await pool.fetch(query("checks.callback_states"))
        report.tasks = {row["state"]: row["tasks"] for row in states}
        report.callbacks = {row["state"]: row["callbacks"] for row in callback_states}
        queued = Queued(settings, pool, topics, show)
        unbegun = Unbegun(settings, pool, topics, show)
        report.add(await _find(settings, pool, topics, queued, unbegun, show), show)
        if not repair or report.clean:
            return report
        session = await stack.enter_async_context(open_session(settings.sessions, "repair"))
        producer = await stack.enter_async_context(running(make_producer(settings)))
        report.repaired = await Repair(settings, pool, session, producer, queued, unbegun).put_back(
            report.counts
        )
        left = Report()
        queued = Queued(settings, pool, topics, show)
        unbegun = Unbegun(settings, pool, topics, show)
        left.add(await _find(settings, pool, topics, queued, unbegun, show), show)
        report.remaining = left.counts
        return report


async def _find(
    settings: Platform,
    pool: asyncpg.Pool[asyncpg.Record],
    topics: Topics,
    queued: Queued,
    unbegun: Unbegun,
    show: int,
) -> list[Found]:
    found = await rows.look(pool, show, partitions_of(settings, HEARTBEATS))
    found += await unbegun.look()
    return found + await Moving(settings, pool, topics, queued).settle()
