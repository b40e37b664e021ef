"""Access lists: each service runs as its own user on a broker that denies every operation not
listed."""

import asyncio
import base64
import re
import shlex
import uuid
from asyncio.subprocess import PIPE, STDOUT
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import running_service
from tests.support.waiting import in_time, wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.errors import KafkaRefused
from penstock.gateway.worker_tail import WorkerTail
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running, translated
from penstock.kafka.client.offset_reader import observing
from penstock.kafka.processing.worker_status import StatusSender
from penstock.kafka.topology import acls, topic_plan, topics
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.group_members import count, remove
from penstock.local import tools
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.kafka_transport import KafkaTransport

pytestmark = pytest.mark.declared_topics

SECRET = "whsec_" + base64.b64encode(bytes(32)).decode()


async def test_every_service_needs_only_its_access_list(secure_kafka, acl_prefix, database):
    """O5: each service does its work with its own user and access list. Tasks enter by topic and by
    HTTP, run on each kind of worker, and end with events and callbacks."""
    callback_received = asyncio.Event()

    async def target(_request):
        callback_received.set()
        return web.Response()

    def service_settings(name):
        return {**secure_kafka.service(name), "prefix": acl_prefix}

    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        app = web.Application()
        app.router.add_post("/hook", target)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hook = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"

        system = System("", acl_prefix, database, stack, pool)
        for name in ("task-sync", "heartbeats", "stages"):
            system.where = service_settings(name)
            await system.start(name)
        callback_settings = CallbacksSettings.load(
            {},
            **service_settings("callbacks"),
            postgres=database,
            callback_secrets=(SECRET,),
            callback_allow=("127.0.0.0/8",),
        )
        await stack.enter_async_context(running_service(callbacks.create_app(callback_settings)))

        gateway = await stack.enter_async_context(
            running_gateway(**service_settings("gateway"), postgres=database, objects="memory:///")
        )
        await wait_until(gateway.is_ready)
        record = b'{"type": "t", "context": 1, "callbacks": ["%s"]}' % hook.encode()
        async with running(make_producer(Kafka.load({}, **service_settings("producer")))) as producer:
            with translated():
                await producer.send_and_wait(acl_prefix + topics.SUBMITTED.name, record)
        held = []

        async def hold():
            held[:] = (await gateway.post("/hold_task", {"worker": "w", "type": "t", "wait_s": 5})).body[
                "tasks"
            ]
            return held

        await wait_until(hold, what="the gateway returns a task")
        result = {name: held[0][name] for name in ("id", "step", "stage", "attempt")}
        answer = await gateway.post("/set_task", {"worker": "w", "results": [{**result, "outcome": "done"}]})
        assert answer.status in (200, 202), answer.body
        await system.become(succeeded=1)
        await in_time(callback_received.wait())

        # Records lost before a worker read them: task-sync reads consumer groups and writes marks.
        await system.submit(1)
        await system.become(succeeded=1, queued=1)
        system.where = {"kafka": secure_kafka.plain, "prefix": acl_prefix}
        await system.lose_records()
        system.where = service_settings("worker")
        await system.work()
        await system.become(succeeded=2)

        async def writes_signs_of_life():
            [page] = (await gateway.get("/workers?type=t")).body["types"]
            return [each for each in page["workers"] if each["kind"] == "worker" and each["seen_at"]]

        await wait_until(writes_signs_of_life, what="the gateway reads signs of life of the worker")
        assert (await gateway.post("/tasks", {"type": "t", "context": 2})).status in (200, 201, 202)
        await system.become(succeeded=3)
        await heartbeats_evicts_a_lost_worker(service_settings)

        settings = Kafka.load({}, **service_settings("consumer"))
        group = f"{acl_prefix}{acls.CONSUMERS}reader"
        seen = 0
        async with running(make_consumer(settings, group, acl_prefix + topics.EVENTS.name)) as consumer:
            while seen < 3:
                with translated():
                    seen += (await in_time(consumer.getone())).value.count(b"succeeded")
                    await consumer.commit()
        operator = Platform.load({}, **service_settings("operator"), postgres=database)
        assert await topic_plan.apply(operator, await topic_plan.plan(operator)) == []
        assert (await check(operator)).clean


async def heartbeats_evicts_a_lost_worker(service_settings):
    """Runs the rare operations of the heartbeats service: group eviction, end offsets of results,
    and offsets of stages."""
    settings = Kafka.load({}, **service_settings("heartbeats"))
    group = topics.workers_group(settings.prefix, "other")
    lost_worker = make_consumer(
        Kafka.load({}, **service_settings("worker")), group, f"{settings.prefix}ready.t", name="lost"
    )
    async with running(lost_worker):

        async def removed():
            return await remove(settings, group, "lost")

        assert await wait_until(removed, what="the lost worker leaves its group") == 1
    async with observing(settings) as observer:
        assert await observer.ends([(topics.STAGE_RESULTS.name, 0)])
    async with admin_client(settings) as admin:
        with translated():
            await admin.list_consumer_group_offsets(topics.service_group(settings.prefix, "stages"))


UNLISTED = {
    # For each user: a topic that it must not write, and one that it must not read.
    "gateway": (topics.SUBMITTED, topics.CALLBACKS_DEAD),
    "task-sync": (topics.EVENTS, topics.CALLBACKS),
    "heartbeats": (topics.STAGE_RESULTS, topics.SUBMITTED),
    "stages": (topics.HEARTBEATS, topics.SUBMITTED),
    "flows": (topics.FLOWS_SUBMITTED, topics.SUBMITTED),
    "callbacks": (topics.STAGE_RESULTS, topics.SUBMITTED),
    "tasklogs": (topics.TASK_LOGS, topics.SUBMITTED),
    "worker": (topics.EVENTS, topics.STAGE_RESULTS),
    "producer": (topics.STAGE_RESULTS, topics.EVENTS),
    "consumer": (topics.EVENTS, topics.SUBMITTED),
}
UNLISTED_FOR_MOST = (topics.HEARTBEATS, topics.SUBMITTED)


async def write_record(settings, topic):
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(settings.prefix + topic.name, b"{}", partition=0)


async def read_record(settings, topic):
    name = settings.prefix + topic.name
    async with running(make_consumer(settings, f"{settings.prefix}unlisted", name)) as consumer:
        with translated():
            await in_time(consumer.getone())


async def test_a_service_is_refused_an_unlisted_operation(secure_kafka, acl_prefix):
    """O5: Kafka refuses to let a service write, read or create an unlisted topic. The error names
    `penstock topics acls`."""
    # The operator reads every topic.
    for name in set(acls.SERVICES) - {"operator"}:
        written_topic, read_topic = UNLISTED.get(name, UNLISTED_FOR_MOST)
        settings = Kafka.load({}, **secure_kafka.service(name), prefix=acl_prefix)
        with pytest.raises(KafkaRefused, match="penstock topics acls"):
            await write_record(settings, written_topic)
        with pytest.raises(KafkaRefused):
            await read_record(settings, read_topic)
        with pytest.raises(KafkaRefused):
            await create_topics(settings, [topics.Topic("another", 1, 1000, "A topic of no service.")])
    # Describing a group without permission raises the same error.
    with pytest.raises(KafkaRefused):
        await count(
            Kafka.load({}, **secure_kafka.service("producer"), prefix=acl_prefix), f"{acl_prefix}workers.t"
        )


# Each run of the tool starts a JVM.
@pytest.mark.long
async def test_kafka_acls_accepts_the_printed_commands(secure_kafka):
    """O5: kafka-acls accepts each form of command that `penstock topics acls` prints, and creates
    the same entries."""
    prefix = f"a-{uuid.uuid4().hex[:10]}."
    # One entry for each kind and pattern, because a run of the tool takes seconds.
    by_operations = sorted(acls.acls(prefix, acls.SERVICES), key=lambda acl: len(acl.operations))
    entry_of_each_form = list({(acl.kind, acl.pattern): acl for acl in by_operations}.values())
    connection_options = ("--bootstrap-server", secure_kafka.plain)

    async def tool(*arguments):
        process = await asyncio.create_subprocess_exec(
            *tools.command("acls", [*connection_options, *arguments]), stdout=PIPE, stderr=STDOUT
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        return output

    for command in acls.commands(entry_of_each_form, f"User:{prefix}{{service}}"):
        await tool(*shlex.split(command)[1:])
    # The tool prints resource by resource, one operation a line.
    found, resource = set(), ("", "", "")
    for line in (await tool("--list")).splitlines():
        if match := re.search(r"resourceType=(\w+), name=([^,]+), patternType=(\w+)", line):
            resource = (match[1].lower(), match[2], match[3].lower())
        elif match := re.search(
            rf"principal=User:{prefix}([\w-]+), .*operation=(\w+), permissionType=ALLOW", line
        ):
            found.add((match[1], *resource, match[2].replace("_", "").lower()))
    assert found == {
        (acl.service, acl.kind, acl.name, acl.pattern, operation.lower())
        for acl in entry_of_each_form
        for operation in acl.operations
    }


async def test_a_missing_right_to_signs_of_life_ends_nothing(secure_kafka, acl_prefix, caplog):
    """H5, O5: a worker and a gateway whose access lists are older than the topic log it, and the
    worker's producer goes on."""
    # A user who has no right to the topic.
    settings = Kafka.load({}, **secure_kafka.service("producer"), prefix=acl_prefix)

    def events():
        return {getattr(record, "event", None) for record in caplog.records}

    async with running(make_producer(settings)) as producer:
        transport = KafkaTransport(producer, settings, "w", HeldTokens())
        tail = WorkerTail(settings)
        sender = StatusSender(lambda _stopped: [b"{}"], transport.send_status, every_s=3600.0)
        both = [asyncio.create_task(tail.run()), asyncio.create_task(sender.run())]
        await wait_until(lambda: {"worker_status_refused", "workers_unreadable"} <= events())
        with translated():
            await producer.send_and_wait(acl_prefix + topics.SUBMITTED.name, b"{}")
        assert not any(task.done() for task in both)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
