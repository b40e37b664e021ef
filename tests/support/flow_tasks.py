"""Tasks that wait for children, without a service that ends their stages."""

from __future__ import annotations

import orjson

from penstock.core.completion import Outcome
from penstock.core.flow.waiting import waiting_definition
from penstock.postgres.queries import bound


async def insert_ready(pool, number, priority):
    """Inserts tasks of the type `t`; returns their ids."""
    rows = await pool.fetch(
        "INSERT INTO task (type, state, stage, content_type, context, priority)"
        " SELECT 't', 'ready', 's', 'json', 'null', $2 FROM generate_series(1, $1) RETURNING id",
        number,
        int(priority),
    )
    return sorted(row["id"] for row in rows)


async def spawn(pool, flows, task_id, number):
    """Lets a task wait for new children; returns the children."""
    await suspend(pool, task_id, number)
    await flows.advance()
    return await pool.fetch(
        "SELECT t.* FROM task t JOIN flow f ON f.id = t.flow_id WHERE f.task_id = $1 ORDER BY t.id", task_id
    )


async def suspend(pool, task_id, number, child_type="t"):
    """Lets a task wait for new children, as its commit does; the owner starts them."""
    await pool.execute("UPDATE task SET state = 'waiting' WHERE id = $1", task_id)
    await pool.execute(
        *bound(
            "flows.suspend",
            task_id=[task_id],
            stage=["joined"],
            definition=[orjson.dumps(waiting_definition(Outcome.SPAWN, {})).decode()],
            inputs=[orjson.dumps({"children": [{"type": child_type}] * number})],
            inputs_ref=[None],
        )
    )
