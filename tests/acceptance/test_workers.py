"""The list of workers of a whole deployment while workers are killed, paused and stopped."""

import signal
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

from penstock.client import Client
from penstock.core.worker_list import HOLD_S, INTERVAL_S, MISSED
from penstock.local.deployment import Deployment
from tests.acceptance.test_detection import working
from tests.support.waiting import wait_until

LEASE_MS = 3_000
TWO_INTERVALS = timedelta(seconds=MISSED * INTERVAL_S)


def process_of(worker):
    """The process of a worker, by its id."""
    return int(worker["id"].split("-")[-2])


async def page_of(client):
    [page] = [each async for each in client.workers("watched")]
    return page


async def test_the_list_is_right_within_two_intervals(shared_options, tmp_path):
    """H5: after kill -9, SIGSTOP and a clean stop, by the stamps of the records; a worker that goes
    on runs again. The task of the lost worker runs elsewhere, and the list says so."""
    ledger = tmp_path / "ledger"
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(Deployment(shared_options()))
        client = await stack.enter_async_context(Client(deployment.gateway_url))
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

        [(process, tasks)] = await lost()
        assert process == killed.pid
        assert tasks == [{"id": task.id, "step": 0, "attempt": 0, "outcome": "expired", "state": "succeeded"}]
