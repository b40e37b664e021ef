"""The services of a task's way, in this process, and a worker when a test needs one."""

import asyncio
from collections import Counter

from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.client.connection import admin_client
from penstock.postgres import tasks
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Worker, WorkerSettings
from tests.support.services import read, restarted_when_ended, running_service
from tests.support.waiting import wait_until

# Seconds between two rechecks of task-sync for lost records.
RECHECK_S = 1.0


async def submit(pool, count=1, type_name="t", **fields):
    """Submits so many tasks in one statement; returns their ids, in the order of the batch."""
    fields = {"context": Context.encode(None)} | fields
    batch = [Submission(type=type_name, **fields) for _ in range(count)]
    return [found.id for found in await tasks.submit(pool, batch)]


class System:
    """A deployment of one type, `t`, with two partitions."""

    def __init__(self, kafka, prefix, database, stack, pool):
        self.where = {"kafka": kafka, "prefix": prefix}
        self.database = database
        self.stack = stack
        self.pool = pool
        self.executed = Counter()
        self.services = {}
        # Settings of the services, which a worker has not.
        self.of_services = {}

    async def start(self, *names, restarted=False, **task_sync_settings):
        """Starts services; `restarted` starts one again when it ends, as a supervisor would."""
        apps = {
            "task-sync": lambda: task_sync.create_app(
                TaskSyncSettings(
                    **self.where,
                    **self.of_services,
                    postgres=self.database,
                    objects="memory:///",
                    recheck_s=RECHECK_S,
                    **task_sync_settings,
                )
            ),
            "heartbeats": lambda: heartbeats.create_app(
                HeartbeatsSettings(
                    **self.where, **self.of_services, postgres=self.database, settle_s=0.3, tick_s=0.2
                )
            ),
            "stages": lambda: stages.create_app(
                StagesSettings(**self.where, **self.of_services, postgres=self.database)
            ),
        }
        for name in names:
            context = restarted_when_ended(apps[name]) if restarted else running_service(apps[name]())
            self.services[name] = await self.stack.enter_async_context(context)

    async def work(self, handler_s=0.0, restarted=False, **given):
        def serve():
            worker = Worker(WorkerSettings(**self.where, objects="memory:///", **given))

            @worker.stage("t.start")
            async def start(task):
                self.executed[task.id] += 1
                await asyncio.sleep(handler_s)
                return Done()

            return worker.serve

        context = restarted_when_ended(serve) if restarted else running_service(serve())
        await self.stack.enter_async_context(context)

    async def submit(self, count):
        return [
            found.id
            for found in await tasks.submit(
                self.pool, [Submission(type="t", context=Context.encode(n)) for n in range(count)]
            )
        ]

    async def states(self):
        rows = await self.pool.fetch("SELECT state, count(*) AS tasks FROM task GROUP BY state")
        return {row["state"]: row["tasks"] for row in rows}

    async def become(self, **states):
        async def so():
            return await self.states() == states

        await wait_until(so, what=f"tasks are {states}")

    async def records(self):
        return await read(self.where["kafka"], f"{self.where['prefix']}ready.t")

    async def lose_records(self):
        """Deletes all records of the ready topic, as retention does."""
        topic = f"{self.where['prefix']}ready.t"
        async with admin_client(self.settings()) as admin:
            await admin.delete_records(
                {TopicPartition(topic, number): RecordsToDelete(before_offset=-1) for number in range(2)}
            )

    def settings(self):
        return WorkerSettings(**self.where)
