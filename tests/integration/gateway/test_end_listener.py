"""Requests that wait until tasks and flows have ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller, running_gateway
from tests.support.services import make_topics
from tests.support.waiting import wait_until

from penstock.client import Client
from penstock.core.access import Role
from penstock.gateway import end_listener
from penstock.http.preferences import LONGEST_WAIT_S
from penstock.postgres.ends import CHANNEL

TASK_TYPES = ()

HELD = {"Prefer": f"wait={LONGEST_WAIT_S}"}


@pytest.fixture
async def gateway(where, monkeypatch) -> AsyncIterator[Caller]:
    # An announcement that is missed is found only after the longest wait: then the test fails.
    monkeypatch.setattr(end_listener, "RENEW_S", 600.0)
    async with running_gateway(**where) as caller:
        await caller.post("/types", {"name": "media"})
        yield caller


async def insert(pool: Any, count: int, type_: str = "media") -> list[int]:
    rows = await pool.fetch(
        """INSERT INTO task (type, stage, state, content_type, context)
           SELECT $2, 's', 'running', 'json', '1' FROM generate_series(1, $1) RETURNING id""",
        count,
        type_,
    )
    return [row["id"] for row in rows]


async def end(pool: Any, ids: Sequence[int], state: str = "succeeded") -> None:
    await pool.execute(
        "UPDATE task SET state = $2, finished_at = now() WHERE id = ANY ($1::bigint[])", ids, state
    )


async def listening(pool: Any) -> bool:
    return bool(await pool.fetchval("SELECT count(*) FROM end_listener"))


async def test_a_request_is_answered_when_the_last_task_ends(gateway, pool):
    """O8: a request that prefers to wait is answered after the end of its last task, and not
    before, whatever the final state is."""
    states = ("succeeded", "failed", "cancelled", "quarantined")
    ids = await insert(pool, len(states) + 1)
    waiting = asyncio.ensure_future(gateway.post("/tasks/states", {"ids": ids}, headers=HELD))
    await wait_until(lambda: listening(pool))
    for task_id, state in zip(ids, states, strict=False):
        shown = asyncio.ensure_future(gateway.get(f"/tasks/{task_id}", headers=HELD))
        await end(pool, [task_id], state)
        assert (await shown).body["state"] == state
        assert not waiting.done()
    assert (await gateway.get(f"/tasks/{ids[0]}", headers=HELD)).body["state"] == states[0]
    await end(pool, ids[-1:], "failed")
    answer = await waiting
    assert answer.body["states"] == {**dict.fromkeys(states, 1), "failed": 2}
    assert answer.headers["Preference-Applied"] == f"wait={LONGEST_WAIT_S}"


async def test_a_request_for_the_first_end_is_answered_at_each_end(gateway, pool):
    """O8: the ended tasks come in the order of their ends. A request is held while none of its
    tasks has ended, and unknown ids are named at once."""
    ids = await insert(pool, 3)
    assert (await gateway.post("/tasks/ended", {"ids": ids})).body == {"ended": [], "unknown": []}
    waiting = asyncio.ensure_future(gateway.post("/tasks/ended", {"ids": ids}, headers=HELD))
    await wait_until(lambda: listening(pool))
    assert not waiting.done()
    await end(pool, ids[2:], "failed")
    answer = await waiting
    assert answer.body == {"ended": [ids[2]], "unknown": []}
    assert answer.headers["Preference-Applied"] == f"wait={LONGEST_WAIT_S}"
    unknown = await gateway.post("/tasks/ended", {"ids": [*ids[:2], 4711]}, headers={"Prefer": "wait=1"})
    assert unknown.body == {"ended": [], "unknown": [4711]}
    await end(pool, ids[1:2])
    await end(pool, ids[:1])
    assert (await gateway.post("/tasks/ended", {"ids": ids}, headers=HELD)).body["ended"] == ids[::-1]


async def test_results_come_in_the_order_of_the_ends(gateway, pool):
    """O8: the client yields each task when it has ended, with its result, and none twice."""
    ids = await insert(pool, 40)
    order = random.Random(3).sample(ids, len(ids))
    seen: list[int] = []

    async def follow() -> None:
        async with Client(gateway.url) as client:
            async for task in client.as_completed([*ids, ids[0]]):
                assert task.result == {"number": ids.index(task.id)}
                seen.append(task.id)

    following = asyncio.ensure_future(follow())
    for number, task_id in enumerate(order):
        result = json.dumps({"number": ids.index(task_id)}).encode()
        await pool.execute(
            "UPDATE task SET state = 'succeeded', result_type = 'json', result = $2, finished_at = clock_timestamp()"
            " WHERE id = $1",
            task_id,
            result,
        )
        if number % 7 == 0:
            await wait_until(lambda expected=number + 1: len(seen) == expected)
    await following
    assert seen == order


async def test_no_end_is_missed(gateway, pool):
    """Tasks end before, while and after requests for them arrive: each request is answered, though
    the listener reads again only after ten minutes."""
    seed = random.Random(7)
    ids = await insert(pool, 300)

    async def end_later(task_id: int) -> None:
        await asyncio.sleep(seed.random())
        await end(pool, [task_id])

    async def ask_later(chosen: list[int]) -> dict[str, int]:
        await asyncio.sleep(seed.random())
        # A busy gateway may answer 429 or 503, and clients ask again.
        while "states" not in (
            answer := (await gateway.post("/tasks/states", {"ids": chosen}, headers=HELD)).body
        ):
            assert answer["status"] in {429, 503}
        return answer["states"]

    asked = [seed.sample(ids, seed.randint(1, 5)) for _ in range(300)]
    results = await asyncio.gather(*(ask_later(some) for some in asked), *(end_later(one) for one in ids))
    assert results[:300] == [{"succeeded": len(some)} for some in asked]


async def test_a_transaction_that_began_before_the_announcements_is_seen(gateway, pool):
    """The trigger of an open transaction saw no listener. Its end is read a second later."""
    [task_id] = await insert(pool, 1)
    async with pool.acquire() as connection, connection.transaction():
        await end(connection, [task_id])
        waiting = asyncio.ensure_future(gateway.get(f"/tasks/{task_id}", headers=HELD))
        await wait_until(lambda: listening(pool))
    assert (await waiting).body["state"] == "succeeded"


async def test_the_ends_of_a_statement_are_announced_together(pool):
    """A statement that ends a thousand flows sends few notifications, each below the limit of
    PostgreSQL. It announces no flow that goes on, and none that had ended before."""
    ids = [
        row["id"]
        for row in await pool.fetch(
            "INSERT INTO flow (name, version, unfinished) SELECT 'f', 1, 1 FROM generate_series(1, 1000) RETURNING id"
        )
    ]
    ended = "UPDATE flow SET status = 'succeeded', finished_at = now() WHERE id = ANY ($1)"
    await pool.execute(ended, ids[:10])
    await pool.execute("INSERT INTO end_listener VALUES ('test', now() + interval '1 hour')")
    payloads: list[str] = []
    async with pool.acquire() as connection:
        await connection.add_listener(CHANNEL, lambda *notification: payloads.append(notification[3]))
        await pool.execute("UPDATE flow SET updated_at = now()")
        await pool.execute(ended, ids[:-1])
        await wait_until(lambda: sum(len(each.split()) for each in payloads) >= 989)
        await connection.reset()
    assert sorted(int(text) for each in payloads for text in each.split()) == sorted(ids[10:-1])
    assert len(payloads) == 3


async def test_ends_are_told_again_after_a_lost_session(gateway, pool):
    """A listener that loses its session reads again as soon as it has another one."""
    ids = await insert(pool, 2)
    waiting = [asyncio.ensure_future(gateway.get(f"/tasks/{one}", headers=HELD)) for one in ids]
    await wait_until(lambda: listening(pool))
    await pool.execute("DELETE FROM end_listener")
    await pool.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%gateway ends%' AND datname = current_database()"
    )
    await end(pool, ids[:1])
    assert (await waiting[0]).body["state"] == "succeeded"
    await end(pool, ids[1:])
    assert (await waiting[1]).body["state"] == "succeeded"


async def test_a_gateway_without_waiting_requests_listens_no_more(gateway, pool, monkeypatch):
    """S6: without waiting requests no end is announced, and the session is closed."""
    monkeypatch.setattr(end_listener, "RENEW_S", 0.1)
    [task_id] = await insert(pool, 1)
    waiting = asyncio.ensure_future(gateway.get(f"/tasks/{task_id}", headers=HELD))
    await wait_until(lambda: listening(pool))
    await end(pool, [task_id])
    await waiting

    async def silent() -> bool:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%gateway ends%' AND datname = current_database()"
        return not await listening(pool) and not await pool.fetchval(sessions)

    await wait_until(silent)


async def test_a_stopping_gateway_answers_waiting_requests(where, pool):
    """O11: requests that wait do not delay the stop; they get the states of that moment."""
    async with running_gateway(**where) as caller:
        await caller.post("/types", {"name": "media"})
        [task_id] = await insert(pool, 1)
        waiting = asyncio.ensure_future(caller.get(f"/tasks/{task_id}", headers=HELD))
        await wait_until(lambda: listening(pool))
    # The gateway stops within its own limit of ten seconds, which is less than the wait.
    assert (await waiting).body["state"] == "running"


async def test_foreign_tasks_are_not_waited_for(kafka_servers, prefix, database, tmp_path, pool):
    """O5: the answer does not depend on when a task of another namespace ends."""
    await make_topics(kafka_servers, prefix)
    _, everything = await make_key(database, Role.ADMIN)
    _, acme = await make_key(database, Role.READER, ["acme"])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        for name in ("acme--media", "beta--media"):
            await caller.post("/types", {"name": name}, headers=sent(everything))
        [foreign] = await insert(pool, 1, "beta--media")
        answer = await caller.post("/tasks/states", {"ids": [foreign]}, headers=sent(acme) | HELD)
        assert answer.body == {"states": {}, "unknown": [foreign]}
        assert (await caller.get(f"/tasks/{foreign}", headers=sent(acme) | HELD)).status == 404


async def test_an_unknown_preference_is_ignored(gateway, pool):
    """RFC 7240: a server ignores preferences that it does not know or cannot read."""
    [task_id] = await insert(pool, 1)
    for preference in ("wait", "wait=", "wait=soon", "wait=-1", "wait=²", "respond-async, ,"):
        headers = {"Prefer": preference}
        answer = await gateway.get(f"/tasks/{task_id}", headers=headers)
        assert answer.body["state"] == "running", preference
        assert "Preference-Applied" not in answer.headers, preference
        answer = await gateway.post("/tasks/states", {"ids": [task_id]}, headers=headers)
        assert answer.body["states"] == {"running": 1}, preference
        assert "Preference-Applied" not in answer.headers, preference


async def test_a_submission_ignores_the_preference_to_wait(gateway):
    """RFC 7240: a submission is answered when it is committed, and the answer says no other."""
    draft = {"type": "media", "context": None}
    answer = await gateway.post("/tasks", draft, headers={"Prefer": "wait=60"})
    assert answer.status == 201
    assert "Preference-Applied" not in answer.headers


async def test_the_client_waits_without_polling(gateway, pool):
    """The client's `wait`, `watch` and `wait_for_flow` return after the end, with two requests."""
    ids = await insert(pool, 2)
    [flow] = await pool.fetch(
        """INSERT INTO flow (name, version, definition, unfinished, status, inputs)
           VALUES ('single', 1, '{"nodes": {}}', 1, 'running', '{}') RETURNING id"""
    )
    async with Client(gateway.url, data_dir=None) as client:
        paths: list[str] = []
        send = client._send

        async def counted(method: str, path: str, *rest: Any) -> dict[str, Any]:
            paths.append(path)
            return await send(method, path, *rest)

        client._send = counted  # type: ignore[method-assign]
        tasks = asyncio.ensure_future(client.wait(ids))
        ended = asyncio.ensure_future(client.wait_for_flow(flow["id"]))
        await wait_until(lambda: listening(pool))
        await wait_until(lambda: paths.count("/tasks/states") == 2)
        await end(pool, ids)
        assert await tasks == {"succeeded": 2}
        await pool.execute("UPDATE flow SET status = 'failed', finished_at = now() WHERE id = $1", flow["id"])
        assert (await ended).status == "failed"
        assert paths.count("/tasks/states") == 2
