"""A task that kills its worker is found alone, on a whole deployment with real worker processes."""

import asyncio
import os
import resource
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from penstock.client import Client, Draft
from penstock.local.deployment import Deployment
from tests.support.services import read
from tests.support.waiting import wait_until

# Seconds in which healthy tasks end beside one killer, with leases of two seconds: 18 on an idle
# machine. Before suspects ran last, half of them took longer than this.
WITHIN_S = 90.0


@asynccontextmanager
async def supervised_worker(environment):
    """A worker process that is started again whenever it dies; yields how often each status
    came."""
    deaths = Counter()

    async def supervise():
        while True:
            worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.acceptance.killing_worker",
                env={**os.environ, **environment},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
            )
            try:
                deaths[await worker.wait()] += 1
            except asyncio.CancelledError:
                worker.terminate()
                await worker.wait()
                raise

    supervising = asyncio.create_task(supervise())
    try:
        yield deaths
    finally:
        supervising.cancel()
        await asyncio.wait({supervising})


@pytest.mark.parametrize(
    ("transport", "killers", "healthy"),
    [
        ("kafka", ["exit"], 8),
        pytest.param("kafka", ["exit", "segfault", "kill"], 50, marks=pytest.mark.long),
        pytest.param("http", ["exit", "segfault", "kill"], 50, marks=pytest.mark.long),
    ],
)
async def test_only_the_tasks_that_kill_their_worker_are_quarantined(
    shared_options, transport, killers, healthy
):
    """W8: beside healthy tasks, each killer is quarantined after `max_losses` losses. All others
    succeed, and none of them is charged as often."""
    await run_killers(shared_options, transport, killers, healthy)


# Among other tests the short leases run out, too.
@pytest.mark.alone
@pytest.mark.long
async def test_a_killer_costs_its_neighbours_three_attempts_at_most(shared_options):
    """W8: fifty innocents beside one killer, which would keep them queued if they ran behind it."""
    attempts, took_s = await run_killers(shared_options, "kafka", ["kill"], 50)
    print(f"fifty innocents in {took_s:.1f} s, at most {attempts} attempts")
    assert attempts <= 3
    assert took_s <= WITHIN_S


async def run_killers(shared_options, transport, killers, healthy):
    """Returns the most attempts of an innocent task, and the seconds until all had ended."""
    async with Deployment(shared_options()) as deployment, Client(deployment.gateway_url) as client:
        await client.register_type("risky", lease_ms=2_000, retry_base_ms=50, max_losses=3, max_attempts=10)
        environment = dict(deployment.environment)
        if transport == "http":
            environment["PENSTOCK_WORKER_GATEWAY"] = deployment.gateway_url
        drafts = [Draft(type="risky", context="") for _ in range(healthy)]
        for number, way in enumerate(killers):
            drafts.insert(2 * number + 3, Draft(type="risky", context=way))
        submitted = await client.submit_many(drafts)
        innocent = [task.id for draft, task in zip(drafts, submitted, strict=True) if not draft.context]
        began_s = time.monotonic()
        async with supervised_worker(environment) as deaths:
            await client.wait(innocent)
            took_s = time.monotonic() - began_s
            await client.wait([task.id for task in submitted])
            tasks = [await client.get(task.id) for task in submitted]
    states = Counter((draft.context, task.state) for draft, task in zip(drafts, tasks, strict=True))
    assert states == {("", "succeeded"): healthy} | {(way, "quarantined"): 1 for way in killers}
    attempts = max(task.attempt + 1 for task in tasks if task.id in innocent)
    assert set(deaths) <= {17, -11, -9, 0}
    # Each death is charged to a killer, except those of the first tasks that ran together.
    assert sum(deaths[status] for status in (17, -11, -9)) <= 3 * len(killers) + len(killers)
    return attempts, took_s


async def test_a_task_that_kills_its_worker_at_once_is_quarantined(shared_options, tmp_path):
    """W3, W8: a handler that kills its process within milliseconds is not counted the first time,
    because its attempt is not claimed yet. It is counted from then on, and quarantined.

    W8, L2: each attempt of a task that logs first has its lines, and a mark that the worker was
    lost.

    W8: each attempt charges before it dies, with the same idempotency key: one charge.
    """
    options = shared_options()
    async with Deployment(options) as deployment, Client(deployment.gateway_url) as client:
        await client.register_type(
            "risky", lease_ms=2_000, retry_base_ms=50, max_losses=3, max_attempts=10, partitions=1
        )

        async def claims():
            records = await read(deployment.kafka, f"{options.prefix}heartbeats")
            return sum(len(record["tasks"]) for record in records if record["kind"] == "claim")

        async def runs_unclaimed():
            before = await claims()
            task = await client.submit("risky", "", stage="quick")
            await client.wait([task.id])
            return await claims() == before

        charges = tmp_path / "charges"
        async with supervised_worker({**deployment.environment, "CHARGES": str(charges)}) as deaths:
            await wait_until(runs_unclaimed, what="short tasks run before they are claimed")
            killer = await client.submit("risky", "swift", stage="start")
            await client.wait([killer.id])
            found = await client.get(killer.id)
            after = await client.submit("risky", "", stage="quick")
            await client.wait([after.id])
            deaths_of_killer = deaths[-9]
            logging_killer = await client.submit("risky", "logged", stage="start")
            await client.wait([logging_killer.id])
            runs = await client.log_runs(logging_killer.id)
            lines = {
                run["attempt"]: [
                    line["text"] async for line in client.log_lines(logging_killer.id, 0, run["attempt"])
                ]
                for run in runs
            }
            logged = await client.get(logging_killer.id)
    assert found.state == "quarantined"
    assert deaths_of_killer == 4, "one death before a claim, and one for each of the losses"
    assert logged.state == "quarantined"
    lost = "worker lost; the last 250 ms may be missing"
    expected = range(len(logged.attempts))
    assert lines == {attempt: [f"attempt {attempt} loads the file", lost] for attempt in expected}
    assert [run["state"] for run in runs] == ["lost"] * len(runs)
    assert len({run["worker"] for run in runs}) == len(runs) >= 2
    calls = [line.split() for line in charges.read_text().splitlines()]
    assert {attempt for _key, attempt in calls} >= {f"{logged.id}-0-{attempt}" for attempt in expected}
    assert {key for key, _attempt in calls} == {f"{logged.id}-0"}, (
        "the payment service charges once for each key"
    )
