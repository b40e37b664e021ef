"""Finding callbacks to show or replay: what a namespace sees of a state that has no index of its own."""

from __future__ import annotations

import asyncpg
import pytest

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.postgres import replay, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.replay import Place, Which

OWED = (
    "INSERT INTO penstock.callback (id, namespace, target, task_id, state, body, due_at) "
    "SELECT $1 || n, $5, 'https://hook.example/' || n % 3, $2, 'pending', '', now() + make_interval(secs => n + $3) "
    "FROM generate_series(1, $4) n"
)


async def owe(pool: asyncpg.Pool, type_name: str, count: int, later_s: int) -> None:
    """A task of the type, and so many pending callbacks of it, due one after the other from then on."""
    await types.register(pool, types.TaskType(name=type_name))
    [task] = await tasks.submit(pool, [Submission(type=type_name, context=Context.encode(None))])
    await pool.execute(OWED, f"{type_name}-", task.id, later_s, count, namespace_of(type_name))


async def test_pending_callbacks_behind_those_of_others_are_found(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, O5: among how many pending ones it is looked is counted in what whoever asks may see: a namespace finds its own however
    many of others are due before; what a question costs stays bounded in those."""
    monkeypatch.setattr(replay, "PENDING_LOOKED_AT", 10)
    async with open_pool(database, "test") as pool:
        await owe(pool, "beta--a", 40, 0)
        await owe(pool, "acme--a", 15, 100)

        async def found(**given: object) -> list[str]:
            which = Which(state="pending", **given)
            return [one.id for one in await replay.find(pool, which, behind=Place(), limit=100)]

        mine = await found(namespaces=["acme"])
        assert set(mine) == {f"acme--a-{n}" for n in range(1, 11)}
        of_one = await found(namespaces=["acme"], target="https://hook.example/0")
        assert of_one == [f"acme--a-{n}" for n in (3, 6, 9)]
        # Whoever sees all finds what is due first, of anybody.
        assert {one.partition("-a-")[0] for one in await found()} == {"beta-"}
        assert await found(namespaces=[]) == []
