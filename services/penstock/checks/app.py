"""The check: a search for offenders against all rules; with `repair` a second one after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

from penstock.checks import flows, in_transit, leases, rows
from penstock.checks.kafka import Topics
from penstock.checks.misplaced import Misplaced
from penstock.checks.missing import missing_tasks
from penstock.checks.queued import Queued
from penstock.checks.report import Offender, Offenders, Report, Rule
from penstock.checks.rule import Check, System, Writers
from penstock.checks.stuck_callbacks import StuckCallbacks
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.postgres import checks
from penstock.postgres.checks import MOST_COUNTED
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.settings import Platform

__all__ = ["Offender", "Report", "Rule", "check"]

# Offenders against one rule that are named by default.
SHOW = 20


# All rules, in the order of a report.
RULES: tuple[type[Check], ...] = (
    rows.Overdue,
    leases.Unwatched,
    leases.Silent,
    rows.Waiting,
    rows.Unsent,
    rows.Unpublished,
    rows.Refused,
    rows.UnpublishedResults,
    rows.RefusedResults,
    rows.Undelivered,
    rows.Ahead,
    rows.Lost,
    rows.Miscounted,
    StuckCallbacks,
    in_transit.Unreleased,
    in_transit.Unheard,
    in_transit.Unread,
    in_transit.Held,
    Misplaced,
    Queued,
    flows.Stalled,
    flows.Leftover,
    flows.Miscounted,
    flows.MiscountedMap,
    flows.Unapplied,
    flows.Unmatched,
)


async def check(settings: Platform, *, repair: bool = False, show: int = SHOW) -> Report:
    """Checks the invariant on a live system; candidates have `SETTLE_S` seconds to move.

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
        system = System(settings, pool, Topics(settings, admin, consumer), show)
        report = Report(
            await checks.counts(pool, "checks.states", MOST_COUNTED),
            await checks.counts(pool, "checks.callback_states", MOST_COUNTED),
            await checks.counts(pool, "checks.moved"),
            await missing_tasks(pool, system.topics),
        )
        searches = [rule(system) for rule in RULES]
        report.add(await _find(searches), show)
        if not repair or report.clean:
            return report
        session = await stack.enter_async_context(open_session(settings.sessions, "repair"))
        producer = await stack.enter_async_context(running(make_producer(settings)))
        report.repaired = await _repair(searches, Writers(system, session, producer), report.counts)
        second = Report()
        second.add(await _find([rule(system) for rule in RULES]), show)
        report.remaining = second.counts
        return report


async def _find(searches: Sequence[Check]) -> list[Offenders]:
    found = {search: await search.find() for search in searches if not search.moves}
    found |= await in_transit.settled(search for search in searches if search.moves)
    return [offenders for search in searches for offenders in found[search].values()]


async def _repair(searches: Sequence[Check], writers: Writers, found: Counter[Rule]) -> Counter[Rule]:
    repaired: Counter[Rule] = Counter()
    for rule in found:
        for search in searches:
            if search.rule is rule:
                repaired[rule] += await search.repair(writers)
    return +repaired
