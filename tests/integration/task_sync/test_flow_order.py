"""Order of release among plain tasks and tasks of flows (S3), in every way of releasing."""

import pytest
from tests.integration.flow_owner.support import Owner as FlowOwner
from tests.integration.flow_owner.support import definition
from tests.integration.task_sync.test_concurrency_keys import Owner, index_entries, owner, plan
from tests.integration.task_sync.test_limits import register, settings
from tests.support.flow_tasks import insert_ready, spawn

from penstock.core.task import Priority
from penstock.postgres import backlog, release, types
from penstock.postgres.connection import connect
from penstock.postgres.session import open_session
from penstock.task_sync.limits import ReleaseLimiter

# Each test registers its types.
TASK_TYPES = ()

__all__ = ["owner", "settings"]  # fixtures

HIGHEST, HIGH, MEDIUM, LOW, LOWEST = Priority
# Task, its priority, its root flow and the priority of that. The id of a flow is a time among those
# of tasks. Flow 16 is a child of 15.
TASKS = [
    (10, HIGH, None, None),
    (12, MEDIUM, None, None),
    (20, MEDIUM, None, None),
    (30, HIGHEST, 5, LOW),
    (31, MEDIUM, None, None),
    (50, LOW, 15, MEDIUM),
    (60, HIGHEST, 15, MEDIUM),
    (70, MEDIUM, 15, MEDIUM),
    (80, LOWEST, 15, MEDIUM),
    (90, HIGH, 31, MEDIUM),
]
ORDER = [10, 12, 60, 70, 50, 80, 20, 90, 31, 30]
OLD_INDEXES = """
CREATE INDEX task_ready ON task (type, priority, id) WHERE state = 'ready';
CREATE INDEX task_ready_begun ON task (type, priority, id) WHERE state = 'ready' AND step > 0 AND tracked;
CREATE INDEX task_ready_key ON task (type, priority, key, id) WHERE state = 'ready' AND key IS NOT NULL;
CREATE INDEX task_ready_since ON task (type, stage, priority, updated_at)
    WHERE penstock.backlog_state(state) = 'ready';
"""


async def insert_tasks(pool):
    await pool.executemany(
        "INSERT INTO task (id, type, state, stage, content_type, context, priority, flow_root_id, flow_priority, flow_id,"
        " flow_node, flow_generation, key) OVERRIDING SYSTEM VALUE"
        " VALUES ($1, 't', 'ready', 's', 'json', 'null', $2, $3, $4, $5, 'n' || $1::bigint, 0, 'k' || $1::bigint % 3)",
        [
            (task_id, int(priority), root, level, 16 if task_id == 70 else root)
            for task_id, priority, root, level in TASKS
        ],
    )


@pytest.mark.parametrize(
    "settings_of_type",
    [
        {},
        {"max_in_flight": 100},
        {"max_per_key": 100},
        {"ageing_s": 1e6},
        {"ageing_s": 1e6, "max_per_key": 100},
        {"finish_first": True},
    ],
    ids=lambda given: " ".join(given) or "plain",
)
@pytest.mark.parametrize("limit", [1, 1_000])
async def test_a_flow_takes_the_place_of_one_task(owner, pool, settings_of_type, limit):
    """S3: the order is flow priority, flow id, task priority, task id, and a plain task counts as a
    flow of one task. Workers and the backlog get the priority of the flow."""
    await register(pool, **settings_of_type)
    await insert_tasks(pool)
    counted = {line.priority: line.ready for line in await backlog.entries(pool)}
    assert counted == {HIGH: 1, MEDIUM: 8, LOW: 1}
    assert await owner.drain(limit) == ORDER


@pytest.mark.parametrize("in_flow", [False, True])
async def test_what_a_stage_spawns_takes_the_place_of_its_task(pool, database, in_flow):
    """S3, F6: children of a task that waits are released where the task is: by the id and priority
    of its flow, or by its own. Children of children are, too. So tasks that spawn end one after
    the other, and not in lockstep."""
    await register(pool)
    flows = FlowOwner(pool)
    document = definition("parent", nodes={"one": {"kind": "task", "type": "t"}})
    await flows.define(document)
    if in_flow:
        root = await flows.start(document, priority=HIGH)
        await flows.advance()
        [first] = await flows.tasks()
    else:
        [root] = await insert_ready(pool, 1, priority=HIGH)
        [first] = await flows.tasks()
    later = await insert_ready(pool, 3, priority=HIGH)
    [child, sibling] = await spawn(pool, flows, first["id"], 2)
    grandchildren = await spawn(pool, flows, child["id"], 2)
    for each in (child, sibling, *grandchildren):
        assert (each["flow_root_id"], each["flow_priority"]) == (root, HIGH)
    task_type = (await types.all_types(pool))["t"]
    async with open_session(database, "owner") as session:
        released, _ = await release.release(session, task_type, 100, [])
    order = [task.fence.id for task in released.tasks]
    assert order == [sibling["id"], *(each["id"] for each in grandchildren), *later]


async def test_records_have_the_priority_of_the_flow(pool, database):
    """S3: a worker starts tasks of a flow by the priority of the flow, also those whose records a
    new owner writes again."""
    await register(pool)
    await insert_tasks(pool)
    task_type = (await types.all_types(pool))["t"]
    async with open_session(database, "owner") as session:
        released, _ = await release.release(session, task_type, 100, [])
        [again] = await release.unconfirmed(session, task_type)
    levels = {task_id: priority if level is None else level for task_id, priority, _, level in TASKS}
    for batch in (released, again):
        assert [(task.fence.id, task.priority) for task in batch.tasks] == [
            (one, levels[one]) for one in ORDER
        ]


async def test_an_urgent_task_passes_a_large_fan_out(pool, database):
    """S3: a HIGHEST task beside 100,000 items of a flow is released first.

    The statement reads as many index entries as it releases tasks, also while the upgrade keeps the
    old indexes.
    """
    await register(pool)
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, flow_id, flow_root_id, flow_priority, flow_node,"
        " flow_generation, flow_item)"
        " SELECT 't', 'ready', 's', 'json', 'null', 1, 1, 2, 'n', 0, n FROM generate_series(1, 100000) AS n"
    )
    urgent = await pool.fetchval(
        "INSERT INTO task (type, state, stage, content_type, context, priority)"
        " VALUES ('t', 'ready', 's', 'json', 'null', 0) RETURNING id"
    )
    async with open_session(database, "owner") as session:
        owner = Owner(pool, session)
        owner.limits = ReleaseLimiter(session, owner.woken.append)
        assert (await owner.release(1))[0] == [urgent]
        owner.limits.close()
    connection = await connect(database, "plans")
    for old_indexes in (False, True):
        if old_indexes:
            await pool.execute(OLD_INDEXES)
        for analysed in (False, True):
            if analysed:
                await pool.execute("VACUUM ANALYZE task")
            read = index_entries(
                await plan(
                    connection,
                    "release.release",
                    type="t",
                    limit=10,
                    confirmed=[],
                    tracked=False,
                    excluded=[],
                    version=None,
                )
            )
            assert read.pop("task_release") == 10
            assert set(read) <= {"task_pkey", "release_pkey"}
    await connection.close()
