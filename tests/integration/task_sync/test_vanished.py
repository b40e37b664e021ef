"""A replica of task-sync whose host vanishes, or whose process freezes: another one takes over.

No packet tells of either: there is no FIN and no RST. The replica runs in a network namespace
behind a link that drops its packets, or is stopped by SIGSTOP.
"""

import random
import signal
import sys
import time
from contextlib import ExitStack

import pytest
from tests.chaos.link import link, missing
from tests.support.replicas import linked_postgres, replica
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1),)

__all__ = ["linked_postgres"]

TYPES = [f"t{number}" for number in range(4)]
OWNED = "SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
TAKEOVER_S = 10.0


@pytest.fixture(autouse=True)
def _patient_sessions():
    """Sessions end as soon as in production."""


@pytest.fixture
async def settings(kafka_servers, prefix, linked_postgres):
    await make_topics(kafka_servers, prefix)
    return TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=linked_postgres.url(),
        objects="memory:///",
        recheck_s=3600,
    )


async def submit_everywhere(pool):
    await tasks.submit(pool, [Submission(type=name, context=Context.encode(None)) for name in TYPES])


async def takeover_s(pool, vanish, appear):
    """Seconds from the fault until another replica has released a task of each type; returns when
    both replicas own types again."""
    await wait_until(lambda: pool.fetchval(f"SELECT ({OWNED}) = 2"), what="both replicas own types")
    vanish()
    began_s = time.monotonic()
    await submit_everywhere(pool)
    await wait_until(
        lambda: pool.fetchval("SELECT NOT EXISTS (SELECT FROM task WHERE state = 'ready')"),
        what="all types are released",
    )
    took_s = time.monotonic() - began_s
    appear()
    await wait_until(lambda: pool.fetchval(f"SELECT ({OWNED}) = 2"), what="both replicas own types again")
    return took_s


@pytest.mark.long
@pytest.mark.alone
async def test_a_replica_that_vanishes_or_freezes_loses_its_types(settings):
    """S7, O2: a replica that is stopped (SIGSTOP), or whose host sends and receives no packet any
    more, gives up its types within ten seconds. When it continues, or its link is back, its service
    begins again in the same process, and owns its share of the types."""
    with ExitStack() as stack:
        cable = stack.enter_context(link(random.Random(0))) if missing() is None else None
        async with (
            replica("task-sync", settings, *(cable.prefix if cable else ())) as process,
            open_pool(settings.postgres, "test") as pool,
        ):
            for name in TYPES:
                await types.register(pool, types.TaskType(name=name, partitions=1))
            await wait_until(
                lambda: pool.fetchval(OWNED), what=f"the first replica ({process.pid}) owns types"
            )
            faults = {
                "stop": (
                    lambda: process.send_signal(signal.SIGSTOP),
                    lambda: process.send_signal(signal.SIGCONT),
                )
            }
            if cable:
                faults["last packet"] = (lambda: cable.drop(out=1.0, back=1.0), cable.drop)
            async with running_service(create_app(settings)):
                for fault, (vanish, appear) in faults.items():
                    took_s = await takeover_s(pool, vanish, appear)
                    assert process.returncode is None
                    sys.stderr.write(f"\nreleases of all types {took_s:.2f} s after the {fault}\n")
                    assert took_s < TAKEOVER_S
    if cable is None:
        pytest.skip(f"stopped only: {missing()}")
