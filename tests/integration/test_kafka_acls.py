"""Every service with its own user and its access list alone, on a broker that denies what is not listed."""

import asyncio
import base64
import re
import shlex
import uuid
from asyncio.subprocess import PIPE, STDOUT
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiokafka.errors import for_code
from aiokafka.protocol.admin import CreateAclsRequest
from tests.gateways import running_gateway
from tests.running import running_service
from tests.secured import SERVICES
from tests.system import System
from tests.waiting import wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.errors import KafkaRefused
from penstock.kafka import acls, planning, topics
from penstock.kafka.connection import (
    admin_client,
    create_topics,
    make_consumer,
    make_producer,
    running,
    translated,
)
from penstock.kafka.membership import count, remove
from penstock.kafka.observer import observing
from penstock.local import tools
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform

# As Kafka's protocol numbers them.
KINDS = {acls.TOPIC: 2, acls.GROUP: 3}
PATTERNS = {acls.LITERAL: 3, acls.PREFIXED: 4}
OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Alter": 7,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
}
ALLOW = 3
SECRET = "whsec_" + base64.b64encode(bytes(32)).decode()


@pytest.fixture
async def allowed(secure_kafka):
    """A prefix with the platform's topics, of which each service may do what its list says."""
    prefix = f"a-{uuid.uuid4().hex[:10]}."
    settings = Kafka(kafka=secure_kafka.plain, prefix=prefix)
    await create_topics(settings, [*topics.PLATFORM, topics.ready("t", 2)])
    async with admin_client(settings) as admin:
        for entry in acls.acls(prefix, SERVICES):
            for operation in entry.operations:
                request = CreateAclsRequest(
                    KINDS[entry.kind],
                    entry.name,
                    PATTERNS[entry.pattern],
                    f"User:{entry.service}",
                    "*",
                    OPERATIONS[operation],
                    ALLOW,
                )
                answer = await admin._send_to_controller(request)
                for code, message, *_ in answer.creation_responses:
                    assert not code, (for_code(code), message)
        yield prefix
        names = [topic for topic in await admin.list_topics() if topic.startswith(prefix)]
        await admin.delete_topics(names)


async def test_every_service_does_its_work_with_its_list_alone(secure_kafka, allowed, database):
    """D5: submitted by topic and by HTTP, run by a worker of each kind, told on events and by callback, each user by itself."""
    called = asyncio.Event()

    async def target(_request):
        called.set()
        return web.Response()

    def of(name):
        return {**secure_kafka.service(name), "prefix": allowed}

    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        app = web.Application()
        app.router.add_post("/hook", target)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hook = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"

        system = System("", allowed, database, stack, pool)
        for name in ("task-sync", "heartbeats", "stages"):
            system.where = of(name)
            await system.start(name)
        caller = CallbacksSettings.load(
            {},
            **of("callbacks"),
            postgres=database,
            callback_secrets=(SECRET,),
            callback_allow=("127.0.0.0/8",),
        )
        await stack.enter_async_context(running_service(callbacks.create_app(caller)))

        gateway = await stack.enter_async_context(
            running_gateway(**of("gateway"), postgres=database, objects="memory:///")
        )
        await wait_until(gateway.is_ready)
        record = b'{"type": "t", "context": 1, "callbacks": ["%s"]}' % hook.encode()
        async with running(make_producer(Kafka.load({}, **of("producer")))) as producer:
            with translated():
                await producer.send_and_wait(allowed + topics.SUBMITTED.name, record)
        held = []

        async def hold():
            held[:] = (await gateway.post("/hold_task", {"worker": "w", "type": "t", "wait_s": 5})).body[
                "tasks"
            ]
            return held

        await wait_until(hold, what="the gateway has handed the task out")
        result = {name: held[0][name] for name in ("id", "step", "stage", "attempt")}
        answer = await gateway.post("/set_task", {"worker": "w", "results": [{**result, "outcome": "done"}]})
        assert answer.status in (200, 202), answer.body
        await system.become(succeeded=1)
        await asyncio.wait_for(called.wait(), 60)

        # Lost before any worker came: task-sync looks at groups and writes marks to find that out.
        await system.submit(1)
        await system.become(succeeded=1, queued=1)
        system.where = {"kafka": secure_kafka.plain, "prefix": allowed}
        await system.lose_records()
        system.where = of("worker")
        await system.work()
        await system.become(succeeded=2)
        assert (await gateway.post("/tasks", {"type": "t", "context": 2})).status in (200, 201, 202)
        await system.become(succeeded=3)
        await heartbeats_look_after_the_lost(of)

        settings = Kafka.load({}, **of("consumer"))
        group = f"{allowed}{acls.CONSUMERS}mine"
        seen = 0
        async with running(make_consumer(settings, group, allowed + topics.EVENTS.name)) as consumer:
            while seen < 3:
                with translated():
                    seen += (await asyncio.wait_for(consumer.getone(), 60)).value.count(b"succeeded")
                    await consumer.commit()
        operator = Platform.load({}, **of("operator"), postgres=database)
        assert await planning.apply(operator, await planning.plan(operator)) == []
        assert (await check(operator)).clean


async def heartbeats_look_after_the_lost(of):
    """What the heartbeats service does rarely: it takes a lost worker out of its group, and asks where results end."""
    settings = Kafka.load({}, **of("heartbeats"))
    group = topics.workers_group(settings.prefix, "other")
    lost = make_consumer(Kafka.load({}, **of("worker")), group, f"{settings.prefix}ready.t", name="lost")
    async with running(lost):

        async def out():
            return await remove(settings, group, "lost")

        assert await wait_until(out, what="the lost worker is out of its group") == 1
    async with observing(settings) as observer:
        assert await observer.ends([(topics.STAGE_RESULTS.name, 0)])
    async with admin_client(settings) as admin:
        with translated():
            await admin.list_consumer_group_offsets(topics.service_group(settings.prefix, "stages"))


BEYOND = {
    # What each would do beyond its own: a topic that others write, and one that others read.
    "gateway": (topics.SUBMITTED, topics.CALLBACKS_DEAD),
    "task-sync": (topics.EVENTS, topics.CALLBACKS),
    "heartbeats": (topics.STAGE_RESULTS, topics.SUBMITTED),
    "stages": (topics.HEARTBEATS, topics.SUBMITTED),
    "callbacks": (topics.STAGE_RESULTS, topics.SUBMITTED),
    "worker": (topics.EVENTS, topics.STAGE_RESULTS),
    "producer": (topics.STAGE_RESULTS, topics.EVENTS),
    "consumer": (topics.EVENTS, topics.SUBMITTED),
}


async def write_one(settings, topic):
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(settings.prefix + topic.name, b"{}", partition=0)


async def read_one(settings, topic):
    name = settings.prefix + topic.name
    async with running(make_consumer(settings, f"{settings.prefix}not-mine", name)) as consumer:
        with translated():
            await asyncio.wait_for(consumer.getone(), 60)


async def test_nobody_does_what_is_not_on_its_list(secure_kafka, allowed):
    """D5: writing another's topic, reading another's, and making one are refused, with where to look."""
    for name, (written, read) in BEYOND.items():
        settings = Kafka.load({}, **secure_kafka.service(name), prefix=allowed)
        with pytest.raises(KafkaRefused, match="penstock topics acls"):
            await write_one(settings, written)
        with pytest.raises(KafkaRefused):
            await read_one(settings, read)
        with pytest.raises(KafkaRefused):
            await create_topics(settings, [topics.Topic("another", 1, 1000, "Nobody's.")])
    # Who may not look at a group is told so, too.
    with pytest.raises(KafkaRefused):
        await count(Kafka.load({}, **secure_kafka.service("producer"), prefix=allowed), f"{allowed}workers.t")


async def test_kafkas_own_tool_takes_the_commands_that_are_printed(secure_kafka):
    """D5: what `penstock topics acls` prints is understood by kafka-acls, in each form that there is, and means what was meant."""
    prefix = f"a-{uuid.uuid4().hex[:10]}."
    # Of each kind and pattern the one with the most operations; each run of the tool takes seconds.
    by_operations = sorted(acls.acls(prefix, acls.SERVICES), key=lambda one: len(one.operations))
    of_each_form = list({(one.kind, one.pattern): one for one in by_operations}.values())
    reach = ("--bootstrap-server", secure_kafka.plain)

    async def tool(*arguments):
        started = await asyncio.create_subprocess_exec(
            *tools.command("acls", [*reach, *arguments]), stdout=PIPE, stderr=STDOUT
        )
        said = (await started.communicate())[0].decode()
        assert started.returncode == 0, said
        return said

    for command in acls.commands(of_each_form, f"User:{prefix}{{service}}"):
        await tool(*shlex.split(command)[1:])
    # As the tool shows them: resource by resource, an operation a line.
    found, resource = set(), ("", "", "")
    for line in (await tool("--list")).splitlines():
        if match := re.search(r"resourceType=(\w+), name=([^,]+), patternType=(\w+)", line):
            resource = (match[1].lower(), match[2], match[3].lower())
        elif match := re.search(
            rf"principal=User:{prefix}([\w-]+), .*operation=(\w+), permissionType=ALLOW", line
        ):
            found.add((match[1], *resource, match[2].replace("_", "").lower()))
    assert found == {
        (one.service, one.kind, one.name, one.pattern, operation.lower())
        for one in of_each_form
        for operation in one.operations
    }
