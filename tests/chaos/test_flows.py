"""Flows of all kinds while their owners, other services and servers are killed."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
from contextlib import suppress
from functools import partial

import asyncpg
import orjson
import pytest

from penstock.checks.app import check
from penstock.contracts.context import Context
from penstock.core.flow.plan import Policy
from penstock.errors import NotFound, PenstockError
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_starts import FlowStart, match_events, start
from penstock.settings import Platform
from tests.support.flows import reference
from tests.support.random_flows import LEAF, Family
from tests.support.waiting import wait_until

LONG = os.environ.get("PENSTOCK_CHAOS_LONG", "") not in ("", "0")
FLOWS = int(os.environ.get("PENSTOCK_CHAOS_FLOWS", "10000" if LONG else "60"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED") or secrets.randbelow(1_000_000))
# Seconds for all of them: a run without progress would never end.
LIMIT_S = 600 + FLOWS
# A second between two kills of an owner: less than a replica needs to start.
PACE_S = 1.0
# Errors while the database is killed.
AWAY = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    PenstockError,
)
OTHERS = ("stages", "task-sync", "postgres", "kafka")


async def begin(pool, rng):
    """Starts random flows; returns them by id."""
    families = [Family(rng, number, Policy.CONTINUE) for number in range(FLOWS)]
    for family in families:
        for key, end in family.world.ends.items():
            # A task cannot cancel itself.
            family.world.ends[key] = "failed" if end == "cancelled" else end
        for values in family.inputs["lists"].values():
            values[:] = ["failed" if value == "cancelled" else value for value in values]
    documents = [LEAF, *(family.document for family in families)]
    await pool.executemany(
        "INSERT INTO flow_definition (name, version, definition) VALUES ($1, 1, $2)",
        [(document["flow"], orjson.dumps(document).decode()) for document in documents],
    )
    given = [
        FlowStart(
            name=family.document["flow"],
            version=1,
            unfinished=len(family.document["nodes"]),
            inputs=Context.encode(family.inputs),
            versions={"leaf": 1},
        )
        for family in families
    ]
    for first in range(0, FLOWS, 500):
        started = await start(pool, given[first : first + 500])
        for family, found in zip(families[first : first + 500], started, strict=True):
            family.id = found.id
    return families


async def send_events(pool):
    """Sends the event of every wait, again and again."""
    while True:
        try:
            await pool.execute(
                """INSERT INTO flow_event (namespace, id, event, key)
                   SELECT namespace, key, event, key FROM flow_wait ON CONFLICT DO NOTHING"""
            )
            await match_events(pool)
        except AWAY:
            # The next round sends them.
            pass
        await asyncio.sleep(0.2)


async def pause_and_resume(pool, rng, flow_ids):
    """Pauses some flows and resumes them, again and again, which changes no end of theirs."""
    while True:
        chosen = rng.sample(flow_ids, 5)
        for kind in ("pause", "resume"):
            await wait_until(partial(_commanded, pool, chosen, kind), what="the database answers")
            await asyncio.sleep(PACE_S)


async def _commanded(pool, flow_ids, kind):
    try:
        await pool.execute(
            """INSERT INTO flow_inbox (root_id, flow_id, kind)
               SELECT root_id, id, $2 FROM flow WHERE id = ANY ($1::bigint[]) AND status = 'running'""",
            flow_ids,
            kind,
        )
    except AWAY:
        return False
    return True


async def kill_owners(deployment, pool, rng):
    """Kills an owner every second, but not before an owner has applied something since the last
    one was killed: on a busy machine none would ever have started."""
    while True:
        await _progress(pool, "max(updated_at)")
        with suppress(NotFound):
            # It is starting again.
            deployment.kill(rng.choice(["flows", "flows-2"]))
        await asyncio.sleep(PACE_S)


async def kill_others(deployment, pool, rng):
    """Kills another program each time that flows have ended since the last one was killed: a
    database that is killed while it recovers would never come back."""
    others = list(OTHERS)
    rng.shuffle(others)
    while others:
        await _progress(pool, "count(finished_at)")
        with suppress(NotFound):
            deployment.kill(rng.choice(OTHERS) if LONG else others.pop())
        await asyncio.sleep(PACE_S)


async def _progress(pool, mark):
    """Waits until a figure of the flows has changed, and the database answers."""

    async def figure():
        try:
            return await pool.fetchval(f"SELECT {mark}::text FROM flow")
        except AWAY:
            return None

    before = await wait_until(figure, what="the database answers", every=0.2)

    async def changed():
        return await figure() not in (None, before)

    await wait_until(changed, what=f"{mark} of flows changes", every=0.2, timeout=LIMIT_S)


@pytest.mark.long
async def test_killed_owners_lose_no_flow_and_start_nothing_twice(tmp_path):
    """O1, F1, F2, F5: every flow ends as the model says, though some are paused meanwhile. Each
    child exists once, the check is clean."""
    rng = random.Random(SEED)
    replicas = {**dict.fromkeys(SERVICES, 1), "flows": 2}
    environment = {"PENSTOCK_SESSION_TIMEOUT_S": "6", "PENSTOCK_FLOW_SWEEP_S": "1", "PENSTOCK_RECOUNT_S": "2"}
    options = Options(
        data_dir=tmp_path,
        kafka_port=0,
        postgres_port=0,
        gateway_port=0,
        replicas=replicas,
        environment=environment,
    )
    async with Deployment(options) as deployment, open_pool(deployment.postgres, "chaos") as pool:
        await types.register(pool, types.TaskType(name="a", partitions=4, lease_ms=3_000))
        command = [sys.executable, "-m", "tests.chaos.flow_worker"]
        worker = await asyncio.to_thread(
            subprocess.Popen, command, env={**os.environ, **deployment.environment}
        )
        families = await begin(pool, rng)
        background = [
            asyncio.create_task(send_events(pool)),
            asyncio.create_task(pause_and_resume(pool, rng, [family.id for family in families])),
            asyncio.create_task(kill_owners(deployment, pool, rng)),
            asyncio.create_task(kill_others(deployment, pool, rng)),
        ]
        try:
            await wait_until(
                lambda: _ended(pool),
                what=f"seed {SEED}: all flows have ended",
                every=0.5,
                timeout=LIMIT_S,
            )
        finally:
            for task in background:
                task.cancel()
            results = await asyncio.gather(*background, return_exceptions=True)
            worker.terminate()
            await asyncio.to_thread(worker.wait)
        assert [each for each in results if isinstance(each, Exception)] == []
        settings = Platform.load(deployment.environment)
        await wait_until(lambda: _clean(settings), what=f"seed {SEED}: penstock check is clean", every=0.5)
        for family in families:
            rows = await pool.fetch("SELECT name, status FROM flow_node WHERE flow_id = $1", family.id)
            found = {row["name"]: row["status"] for row in rows}
            assert found == reference(family.plan, family.world), f"seed {SEED}: flow {family.id}"
        attempts = await pool.fetchval(
            "SELECT count(*) FROM (SELECT FROM attempt WHERE outcome IN ('done', 'fail') GROUP BY task_id, step HAVING count(*) > 1) AS twice"
        )
        assert attempts == 0


async def _ended(pool):
    try:
        return not await pool.fetchval("SELECT count(*) FROM flow WHERE status = 'running'")
    except AWAY:
        return False


async def _clean(settings):
    try:
        return (await check(settings)).clean
    except PenstockError:
        # A server is starting again.
        return False
