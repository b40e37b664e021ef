"""The list of workers of a whole deployment while workers are killed, paused and stopped."""

import asyncio
import signal
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

import aiohttp
import asyncpg

from penstock.client import Client
from penstock.core.worker_list import HOLD_S, INTERVAL_S, MISSED
from penstock.local.deployment import Deployment
from tests.acceptance.test_detection import working
from tests.support.gateways import Caller
from tests.support.waiting import wait_until

LEASE_MS = 3_000
# More than the client sends at a time, so that the kill finds some of each.
RERUNS = 200
TWO_INTERVALS = timedelta(seconds=MISSED * INTERVAL_S)


def process_of(worker):
    """The process of a worker, by its id."""
    return int(worker["id"].split("-")[-2])


async def page_of(client):
    [page] = [each async for each in client.workers("watched")]
    return page


async def busy_over_http(caller, client):
    """Claims a task for a worker over HTTP; returns its report, which PostgreSQL confirms."""
    await client.register_type("remote", partitions=1)
    task = await client.submit("remote", None)
    await caller.post("/hold_task", {"worker": "remote-1", "type": "remote", "wait_s": 30})

    async def is_claimed():
        return (await client.get(task.id)).raw["worker"] == "remote-1"

    await wait_until(is_claimed)

    async def report():
        entry = {"id": task.id, "step": 0, "stage": "start", "attempt": 0, "outcome": "progress"}
        answer = await caller.post("/set_task", {"worker": "remote-1", "results": [entry]})
        assert (answer.status, answer.body["gone"]) == (200, [])

    return report


async def over_http(client):
    [page] = [each async for each in client.workers("remote")]
    [found] = [each for each in page["workers"] if each["id"] == "remote-1"]
    return found


async def rerun_while_killed(deployment, client, task_id):
    """Kills the gateway in the middle of reruns; each key has one task in the end (F3, T5)."""
    reruns = [
        asyncio.ensure_future(client.rerun(task_id, idempotency_key=f"rerun-{number}"))
        for number in range(RERUNS)
    ]
    await asyncio.wait(reruns, return_when=asyncio.FIRST_COMPLETED)
    deployment.kill("gateway")
    ids = {submitted.id for submitted in await asyncio.gather(*reruns)}
    await deployment.wait_ready(["gateway"])
    again = {(await client.rerun(task_id, idempotency_key=f"rerun-{n}")).id for n in range(RERUNS)}
    connection = await asyncpg.connect(deployment.postgres)
    rows = await connection.fetch("SELECT id FROM penstock.task WHERE rerun_of = $1", task_id)
    await connection.close()
    assert ids == again == {row["id"] for row in rows}
    assert len(ids) == RERUNS
    assert await client.wait(ids) == {"succeeded": RERUNS}


async def test_the_list_is_right_within_two_intervals(shared_options, tmp_path):
    """H5: after kill -9, SIGSTOP and a clean stop, by the stamps of the records; a worker that goes
    on runs again. The task of the lost worker runs elsewhere, and the list says so. A gateway that
    begins again has the same list, with the busy workers over HTTP, and reruns happen once."""
    ledger = tmp_path / "ledger"
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(Deployment(shared_options()))
        client = await stack.enter_async_context(Client(deployment.gateway_url, patience_s=120))
        await client.register_type("watched", lease_ms=LEASE_MS, retry_base_ms=0)
        killed = await stack.enter_async_context(working(deployment, ledger, "hang"))

        async def runs(*processes):
            page = await page_of(client)
            states = {process_of(each): each["state"] for each in page["workers"]}
            return all(states.get(process.pid) == "running" for process in processes)

        await wait_until(lambda: runs(killed))
        task = await client.submit("watched", None)

        async def has_it():
            page = await page_of(client)
            return [each["in_flight"] for each in page["workers"]] == [1]

        await wait_until(has_it, what="the attempt is in flight in the list")
        paused, stopped, working_on = [
            await stack.enter_async_context(working(deployment, ledger, "finish")) for _ in range(3)
        ]
        await wait_until(lambda: runs(killed, paused, stopped, working_on))

        killed.kill()
        paused.send_signal(signal.SIGSTOP)
        stopped.terminate()
        await stopped.wait()
        # Its last record is on Kafka, and the gateway reads it with the next fetch.
        judged = []

        async def is_right():
            page = await page_of(client)
            found = {process_of(each): each for each in page["workers"]}
            judged.append((page, found))
            states = {process: each["state"] for process, each in found.items()}
            return states == {killed.pid: "lost", paused.pid: "lost", working_on.pid: "running"}

        await wait_until(is_right, every=0.1, what="the list is right")
        for page, found in judged:
            as_of = datetime.fromisoformat(page["as_of"])
            for each in found.values():
                silence = as_of - datetime.fromisoformat(each["seen_at"])
                # The stamp of the newest record, and the time that goes on without one.
                if each["state"] == "lost":
                    assert silence + timedelta(seconds=HOLD_S) >= TWO_INTERVALS
                else:
                    assert silence < TWO_INTERVALS
        # Not before two intervals without a record, and for no live worker.
        assert {found[working_on.pid]["state"] for _page, found in judged} == {"running"}
        assert any(stopped.pid not in found for _page, found in judged)
        first_without = next(index for index, (_page, found) in enumerate(judged) if stopped.pid not in found)
        assert all(stopped.pid not in found for _page, found in judged[first_without:])
        assert not any(
            found[stopped.pid]["state"] == "lost" for _page, found in judged if stopped.pid in found
        )

        paused.send_signal(signal.SIGCONT)
        await wait_until(lambda: runs(paused), what="the paused worker runs again")
        assert await client.wait([task.id]) == {"succeeded": 1}

        async def lost():
            [page] = [each async for each in client.workers("watched", state="lost")]
            return [(process_of(each), each["tasks"]) for each in page["workers"]]

        tasks = [{"id": task.id, "step": 0, "attempt": 0, "outcome": "expired", "state": "succeeded"}]
        assert await lost() == [(killed.pid, tasks)]

        session = await stack.enter_async_context(aiohttp.ClientSession())
        caller = Caller(deployment.gateway_url, session)
        report = await busy_over_http(caller, client)
        before = await over_http(client)
        await rerun_while_killed(deployment, client, task.id)
        # It has room for nothing, so it only reports.
        await report()

        async def is_the_same():
            found = await over_http(client)
            return await lost() == [(killed.pid, tasks)] and await runs(paused, working_on) and found

        after = await wait_until(is_the_same, what="the new gateway has the list")
        assert (after["state"], after["in_flight"]) == ("running", 1)
        assert after["seen_at"] > before["seen_at"]
