"""The check: a search for offenders against all rules; with `repair` a second one after it."""

from __future__ import annotations

from contextlib import AsyncExitStack

from penstock.checks import rows
from penstock.checks.flows import Flows
from penstock.checks.in_transit import InTransit
from penstock.checks.kafka import Topics
from penstock.checks.misplaced import Misplaced
from penstock.checks.missing import missing_tasks
from penstock.checks.queued import Queued
from penstock.checks.repair import Repair
from penstock.checks.report import Offender, Offenders, Report, Rule
from penstock.checks.stuck_callbacks import StuckCallbacks
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS
from penstock.postgres import checks
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.settings import Platform

__all__ = ["Offender", "Report", "Rule", "check"]

# Offenders against one rule that are named by default.
SHOW = 20


async def check(settings: Platform, *, repair: bool = False, show: int = SHOW) -> Report:
    """Checks the invariant on a live system; suspects have `SETTLE_S` seconds to move.

    Args:
        settings: where.
        repair: whether to repair the offenders and check again.
        show: how many offenders against one rule to name.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it could not be checked, or not all offenders were
            repaired.
    """
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            open_pool(settings.postgres, "check", pooled=settings.pooled, writing=repair, size=2)
        )
        consumer = await stack.enter_async_context(running(make_consumer(settings, None)))
        admin = await stack.enter_async_context(admin_client(settings))
        topics = Topics(settings, admin, consumer)
        report = Report(await checks.task_counts(pool), await checks.callback_counts(pool))
        queued = Queued(settings, pool, topics, show)
        stuck = StuckCallbacks(settings, pool, topics, show)
        misplaced = Misplaced(settings, pool, topics)
        report.moved = await checks.moved(pool)
        report.missing = await missing_tasks(pool, topics)
        flows = Flows(pool, show)
        report.add(await _find(settings, pool, topics, queued, stuck, misplaced, show), show)
        report.add(await flows.find(), show)
        if not repair or report.clean:
            return report
        session = await stack.enter_async_context(open_session(settings.sessions, "repair"))
        producer = await stack.enter_async_context(running(make_producer(settings)))
        repairs = Repair(settings, pool, session, producer, queued, stuck, topics, misplaced, flows)
        report.repaired = await repairs.repair(report.counts)
        second = Report()
        queued = Queued(settings, pool, topics, show)
        stuck = StuckCallbacks(settings, pool, topics, show)
        misplaced = Misplaced(settings, pool, topics)
        second.add(await _find(settings, pool, topics, queued, stuck, misplaced, show), show)
        second.add(await flows.find(), show)
        report.remaining = second.counts
        return report


async def _find(
    settings: Platform,
    pool: checks.Pool,
    topics: Topics,
    queued: Queued,
    stuck: StuckCallbacks,
    misplaced: Misplaced,
    show: int,
) -> list[Offenders]:
    found = await rows.find(pool, show, partitions_of(settings, HEARTBEATS))
    found += await stuck.find()
    return found + await InTransit(settings, pool, topics, queued, misplaced).find()
