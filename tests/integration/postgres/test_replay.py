"""Finding callbacks to show or replay: the visible callbacks of a namespace, in a state without its
own index."""

from __future__ import annotations

import asyncpg
import pytest

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.postgres import replay, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.replay import CallbackFilter, Cursor

INSERT_PENDING = (
    "INSERT INTO penstock.callback (id, namespace, target, task_id, state, body, due_at) "
    "SELECT $1 || n, $5, 'https://hook.example/' || n % 3, $2, 'pending', '', now() + make_interval(secs => n + $3) "
    "FROM generate_series(1, $4) n"
)


async def add_pending_callbacks(pool: asyncpg.Pool, type_name: str, count: int, later_s: int) -> None:
    """Creates a task of the type with `count` pending callbacks, due one second apart from
    `later_s` on."""
    await types.register(pool, types.TaskType(name=type_name))
    [task] = await tasks.submit(pool, [Submission(type=type_name, context=Context.encode(None))])
    await pool.execute(INSERT_PENDING, f"{type_name}-", task.id, later_s, count, namespace_of(type_name))


async def test_pending_callbacks_behind_other_namespaces_are_found(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, O5: the search limit counts only visible callbacks. A namespace finds its own callbacks
    behind any number of other namespaces' callbacks, at a bounded cost."""
    monkeypatch.setattr(replay, "PENDING_SEARCHED", 10)
    async with open_pool(database, "test") as pool:
        await add_pending_callbacks(pool, "beta--a", 40, 0)
        await add_pending_callbacks(pool, "acme--a", 15, 100)

        async def found(**filters: object) -> list[str]:
            callback_filter = CallbackFilter(state="pending", **filters)
            return [
                callback.id
                for callback in await replay.find(pool, callback_filter, after=Cursor(), limit=100)
            ]

        visible = await found(namespaces=["acme"])
        assert set(visible) == {f"acme--a-{n}" for n in range(1, 11)}
        of_one_target = await found(namespaces=["acme"], target="https://hook.example/0")
        assert of_one_target == [f"acme--a-{n}" for n in (3, 6, 9)]
        # A caller that sees all namespaces finds the callbacks that are due first.
        assert {callback.partition("-a-")[0] for callback in await found()} == {"beta-"}
        assert await found(namespaces=[]) == []
