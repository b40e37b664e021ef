"""Random graphs in PostgreSQL against the reference model, with two owners and crashes.

Every transaction may end at any of its statements, as a crash of the owner or of the server does,
and two owners act on the same flows.
"""

from __future__ import annotations

import asyncio
import random

import asyncpg
import orjson
import pytest
from tests.integration.flow_owner.support import CrashError, FragileConnection, Owner
from tests.support.flows import reference
from tests.support.random_flows import LEAF, Family

from penstock.core.flow.plan import NodeKind, Policy
from penstock.errors import PenstockError
from penstock.postgres.flow_starts import match_events
from penstock.postgres.flows import FlowsLocked


async def advance_fragile(owner, rng):
    """One transaction that may crash; True when it had something to do."""
    async with owner.pool.acquire() as connection:
        last = rng.choice([0, rng.randint(1, 14)])
        fragile = FragileConnection(connection, last, runs_last=rng.random() < 0.5)
        try:
            return await owner.advance_once(rng.choice([1, 3, 50]), connection=fragile)
        except FlowsLocked:
            # The other owner has the flows; a service holds them and tries again.
            return True
        except (CrashError, PenstockError, asyncpg.PostgresError):
            return True


async def end_tasks(owner, families, rng):
    """Ends a random part of the live tasks as the worlds say; returns how many were live."""
    rows = await owner.pool.fetch(
        """SELECT t.*, coalesce(f.parent_id, f.id) AS top, coalesce(f.parent_node, t.flow_node) AS place,
                  CASE WHEN f.parent_id IS NULL THEN t.flow_item ELSE f.parent_item END AS place_item
           FROM task t JOIN flow f ON f.id = t.flow_id WHERE t.state = 'ready' ORDER BY t.id"""
    )
    for row in rng.sample(rows, rng.randint(min(1, len(rows)), len(rows))):
        generation = row["flow_generation"]
        state = families[row["top"]].outcome(row["place"], row["place_item"], generation)
        # A child flow cannot end as cancelled by its task: it fails.
        await owner.end(row, state)
    return len(rows)


async def send_events(owner):
    """Sends the events of all waits."""
    waits = await owner.pool.fetch("SELECT event, key FROM flow_wait")
    for wait in waits:
        await owner.pool.execute(
            "INSERT INTO flow_event (namespace, id, event, key) VALUES ('default', $2, $1, $2) ON CONFLICT DO NOTHING",
            wait["event"],
            wait["key"],
        )
    await match_events(owner.pool)


async def settle(owners, families, rng):
    """Advances, ends tasks and sends events until nothing is left to do."""
    while True:
        worked = await asyncio.gather(*(advance_fragile(owner, rng) for owner in owners))
        live = await end_tasks(owners[0], families, rng)
        await send_events(owners[0])
        if not live and not any(worked):
            left = await owners[0].pool.fetchval(
                "SELECT (SELECT count(*) FROM flow_inbox) + (SELECT count(*) FROM flow_wait) + (SELECT count(*) FROM flow_limit)"
            )
            if not left:
                return


async def begin(pool, rng, count, policy):
    """Two owners, and flows that have been started.

    One owner makes as many rounds in a transaction as there are. The other one makes one, and tells
    the relatives of flows by the inbox.
    """
    owners = [Owner(pool), Owner(pool, budget=0)]
    families = {}
    await owners[0].define(LEAF)
    for number in range(count):
        family = Family(rng, number, policy)
        await owners[0].define(family.document)
        family.id = await owners[0].start(family.document, family.inputs, {"leaf": 1})
        families[family.id] = family
    return owners, families


async def require_consistent(pool):
    """The counters are what the rows say, and nothing is live under a final flow."""
    wrong = await pool.fetch(
        """SELECT f.id, f.status, f.live, f.unfinished, n.running, n.final FROM flow f
           LEFT JOIN LATERAL (SELECT count(*) FILTER (WHERE status = 'running') AS running,
                                     count(*) FILTER (WHERE status NOT IN ('pending', 'ready', 'running')) AS final
                              FROM flow_node WHERE flow_id = f.id) n ON true
           WHERE f.live <> n.running OR (f.status = 'succeeded' AND f.unfinished <> 0)"""
    )
    assert not wrong
    assert not await pool.fetch(
        "SELECT FROM task t JOIN flow f ON f.id = t.flow_id WHERE t.state = 'ready' AND f.status <> 'running'"
    )


@pytest.mark.parametrize("seed", range(2))
async def test_random_flows_end_as_the_model_says(pool, seed):
    """F1, O1: in spite of crashes at every statement, and of two owners at once."""
    rng = random.Random(seed)
    owners, families = await begin(pool, rng, 25, Policy.CONTINUE)
    await settle(owners, families, rng)
    for family in families.values():
        expected = reference(family.plan, family.world)
        rows = await owners[0].nodes(family.id)
        assert rows == expected, orjson.dumps(family.document).decode()
        failed = {"failed", "cancelled", "blocked"} & set(expected.values())
        assert (await owners[0].flow(family.id))["status"] == ("failed" if failed else "succeeded")
    await require_consistent(pool)


async def heal(owners, families):
    """Recovers every flow that did not succeed; from now on everything succeeds."""
    for family in families.values():
        family.world.heals = 0
        flow = await owners[0].flow(family.id)
        if flow["status"] != "succeeded":
            await owners[0].command(family.id, "recover", generation=flow["generation"] + 1)


async def test_commands_leave_no_flow_in_limbo(pool):
    """F3, F5: pauses, cancellations and recoveries at any time; then recoveries heal all."""
    rng = random.Random(100)
    owners, families = await begin(pool, rng, 25, None)
    for _ in range(6):
        for family in families.values():
            flow = await owners[0].flow(family.id)
            kind = rng.choice(["pause", "resume", "cancel", "recover", "", ""])
            if kind == "recover":
                await owners[0].command(family.id, "recover", generation=flow["generation"] + 1)
            elif kind:
                await owners[0].command(family.id, kind)
        await advance_fragile(owners[0], rng)
        await end_tasks(owners[0], families, rng)
    # Two owners at once may apply two commands of a flow in either order: the last one comes alone.
    await owners[0].advance()
    for family in families.values():
        await owners[0].command(family.id, "resume")
    await settle(owners, families, rng)
    assert not await pool.fetch("SELECT id FROM flow WHERE status = 'running'")
    await require_consistent(pool)
    await heal(owners, families)
    await settle(owners, families, rng)
    assert not await pool.fetch("SELECT id FROM flow WHERE status = 'running'")
    await require_consistent(pool)
    for family in families.values():
        kinds = {node.kind for node in family.plan.nodes.values()}
        if not kinds & {NodeKind.SWITCH, NodeKind.MAP}:
            row = await owners[0].flow(family.id)
            assert row["status"] == "succeeded", row["error"]
