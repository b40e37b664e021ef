"""Results and dead letters: a topic that takes none delays no outcome and causes no call."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, bench, make_callback
from tests.support.memory_folder import make_folder
from tests.support.services import restarted_when_ended
from tests.support.waiting import wait_until

from penstock.callbacks import results
from penstock.callbacks.app import create_app
from penstock.contracts.validation import conform
from penstock.errors import KafkaRefused
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import topic_plan
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.local.broker import EmbeddedKafka
from penstock.local.supervisor import Supervisor

TOPICS = (CALLBACKS_RESULTS, CALLBACKS_DEAD)
SETTINGS = {
    "callback_timeout_s": 1.0,
    "callback_schedule_s": ("0.1",),
    "sweep_every_s": 0.2,
    "sweep_age_s": 1.0,
}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAUSE_S", 0.2)
    monkeypatch.setattr(results, "PUBLISH_S", 2.0)
    monkeypatch.setattr(results, "REFUSED_EVERY_S", 0.2)


async def configure(platform: Bench, name: str, value: str) -> None:
    """Sets a config of both topics, and waits until the broker applies it."""
    names = [platform.kafka.prefix + topic.name for topic in TOPICS]
    async with admin_client(platform.kafka) as client:
        await topic_plan._alter(client, {topic: {name: value} for topic in names})

        async def applied() -> bool:
            described = await topic_plan._describe(client, names)
            return all(described[topic].configs[name] == value for topic in names)

        await wait_until(applied, what=f"{name} is {value}")


@asynccontextmanager
async def every_record_refused(platform: Bench) -> AsyncIterator[None]:
    """Kafka refuses each record for its size."""
    await configure(platform, "max.message.bytes", "1")
    yield
    await configure(platform, "max.message.bytes", "1000000")


@asynccontextmanager
async def deleted(platform: Bench) -> AsyncIterator[None]:
    """The topics do not exist."""
    async with admin_client(platform.kafka) as client:
        await client.delete_topics([platform.kafka.prefix + topic.name for topic in TOPICS])
    yield
    await create_topics(platform.kafka, TOPICS)


@asynccontextmanager
async def not_permitted(_platform: Bench) -> AsyncIterator[None]:
    """An access list does not let the service write."""

    async def send_all(*_arguments: Any) -> None:
        raise KafkaRefused("Kafka does not permit this")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(results, "send_all", send_all)
        yield


FAULTS = [every_record_refused, deleted, not_permitted]


async def count_waiting(platform: Bench) -> int:
    return await platform.connection.fetchval(
        "SELECT coalesce(sum(cardinality(records)), 0)::integer FROM callback_outbox"
    )


async def is_empty(platform: Bench) -> bool:
    return not await count_waiting(platform)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_topic_that_takes_no_results_causes_no_second_call(
    platform: Bench, target: Target, fault: Callable[[Bench], Any]
) -> None:
    """C12, guarantee 5: outcomes are in PostgreSQL while `callbacks.results` and `callbacks.dead`
    take no records. Each callback is called once; the topics get their records afterwards."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=410 if request.path == "/gone" else 200)

    target.answer = answer
    made = [make_callback(f"{target.url}/h{number}", number) for number in range(1, 11)]
    made.append(make_callback(f"{target.url}/gone", 11))
    async with AsyncExitStack() as stack:
        async with fault(platform):
            await stack.enter_async_context(platform.service(**SETTINGS))
            await platform.enqueue(*made)

            async def ended() -> bool:
                return await platform.states() == {"delivered": 10, "dead": 1}

            await wait_until(ended)
            late = make_callback(f"{target.url}/h1", 12)
            await platform.enqueue(late)
            await wait_until(lambda: _has_ended(platform, late.id))
            assert await count_waiting(platform) == 13
        await wait_until(lambda: is_empty(platform), what="the sweeper has published everything")
        results_found = await platform.records(CALLBACKS_RESULTS.name, 12)
        while len({result["id"] for result in results_found}) < 12:
            # A record whose confirmation was lost with the topic is there twice.
            results_found = await platform.records(CALLBACKS_RESULTS.name, len(results_found) + 1)
        [letter] = await platform.records(CALLBACKS_DEAD.name, 1)
    assert Counter(target.ids()) == Counter([one.id for one in (*made, late)])
    for result in results_found:
        conform(result, "callback-result")
    assert {result["id"] for result in results_found} == {one.id for one in (*made, late)}
    conform(letter, "callback-dead")
    assert letter["id"] == "msg_11-0-0-succeeded-0"


async def _has_ended(platform: Bench, callback_id: str) -> bool:
    return (await platform.rows())[callback_id]["finished_at"] is not None


async def test_results_of_a_killed_process_are_published(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """O1: a process dies after it has recorded an outcome. The next one publishes the result."""
    environment = {name: str(value) for name, value in SETTINGS.items() if isinstance(value, float)}
    async with deleted(platform):
        async with platform.process(tmp_path, **environment) as process:
            await platform.enqueue(make_callback(f"{target.url}/hook", 1))
            await wait_until(platform.all_delivered)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert await count_waiting(platform) == 1
    async with platform.process(tmp_path, **environment):
        await wait_until(lambda: is_empty(platform))
    [result] = await platform.records(CALLBACKS_RESULTS.name, 1)
    assert (result["task_id"], result["outcome"]) == (1, "delivered")
    assert len(target.calls) == 1


@pytest.mark.long
async def test_outcomes_are_recorded_while_kafka_is_away(prefix: str, database: str, target: Target) -> None:
    """C12, S11: Kafka goes away during the calls. Outcomes are recorded meanwhile, no callback is
    called again, and the results follow when Kafka is back."""
    unblocked = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await unblocked.wait()
        return web.Response()

    target.answer = answer
    folder = make_folder()
    supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    made = [make_callback(f"{target.url}/h{number}", number) for number in range(1, 6)]
    try:
        kafka = EmbeddedKafka(supervisor, folder / "kafka")
        await kafka.start(timeout_s=300.0)
        patient = {**SETTINGS, "callback_timeout_s": 100.0}
        async with (
            bench(kafka.servers, prefix, database) as platform,
            restarted_when_ended(lambda: create_app(platform.settings(**patient))),
        ):
            await platform.enqueue(*made)
            await wait_until(lambda: len(target.calls) == len(made))
            await kafka.stop()
            unblocked.set()
            await wait_until(platform.all_delivered)
            await kafka.start(timeout_s=300.0)
            await wait_until(lambda: is_empty(platform))
            found = await platform.records(CALLBACKS_RESULTS.name, len(made))
    finally:
        supervisor.close()
        shutil.rmtree(folder)
    assert {result["id"] for result in found} == {one.id for one in made}
    assert Counter(target.ids()) == Counter([one.id for one in made])
