"""Submissions of a type that was lost with the database are parked, and submitted again by a
command."""

from __future__ import annotations

import asyncio

import orjson
from click.testing import CliRunner
from tests.support.services import make_topics, read, running_service, write
from tests.support.waiting import wait_until

from penstock.cli.main import cli
from penstock.postgres.connection import open_pool
from penstock.postgres.types import TaskType, register
from penstock.task_sync import app
from penstock.task_sync.settings import TaskSyncSettings


async def test_submissions_of_a_lost_type_are_submitted_again(kafka_servers, prefix, database):
    """T5, O10: submissions of a type that the database does not know are rejected whole. When the
    type is registered again, a command submits them, and a second run makes no second task. What
    was rejected for another reason stays."""
    await make_topics(kafka_servers, prefix)
    settings = TaskSyncSettings(kafka=kafka_servers, prefix=prefix, postgres=database, objects="memory:///")
    submitted = [{"type": "lost", "context": n} for n in range(3)]
    submitted.append({"type": "lost", "context": 3, "idempotency_key": "own"})
    foreign = [{"type": "other", "context": 0}, {"type": "lost", "colour": "red"}, b"\xff"]
    where = ["--kafka", kafka_servers, "--prefix", prefix]

    async def replay(*arguments):
        command = ["rejected", "replay", *arguments, *where]
        return await asyncio.to_thread(CliRunner().invoke, cli, command)

    async with open_pool(database, "test") as pool, running_service(app.create_app(settings)):
        await write(kafka_servers, f"{prefix}submitted", *submitted, *foreign)

        async def all_rejected():
            return len(await read(kafka_servers, f"{prefix}submitted.rejected")) == len(submitted + foreign)

        await wait_until(all_rejected)
        listed = await asyncio.to_thread(CliRunner().invoke, cli, ["rejected", "list", "--json", *where])
        documents = [orjson.loads(line) for line in listed.stdout.splitlines()]
        assert len(documents) == len(submitted + foreign)
        assert {document["topic"] for document in documents} == {f"{prefix}submitted"}
        assert {document["pointer"] for document in documents} >= {"/type", ""}
        assert any('"lost"' in document["original"] for document in documents)
        moments = [document["rejected_at"] for document in documents]
        assert moments == sorted(moments, reverse=True)
        arguments = ["rejected", "list", "submitted", "--limit", "2", "--since", "1h", *where]
        shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert len(shown.stdout.splitlines()) == 1 + 2
        assert "submitted " in shown.stdout
        arguments = ["rejected", "list", "heartbeats", *where]
        assert "no rejected" in (await asyncio.to_thread(CliRunner().invoke, cli, arguments)).stdout
        await register(pool, TaskType(name="lost"))
        asked = await replay("lost")
        assert asked.exit_code == 2
        assert "4 submissions would be submitted again" in asked.stderr
        assert (await replay("unknown", "--yes")).exit_code == 4
        for _ in range(2):
            done = await replay("lost", "--yes")
            assert done.exit_code == 0, done.output
        await write(
            kafka_servers, f"{prefix}submitted", *({"type": "lost", "context": "end"} for _ in range(8))
        )

        async def contexts():
            rows = await pool.fetch("SELECT convert_from(context, 'UTF8') AS context FROM task")
            found = sorted(row["context"] for row in rows)
            ended = found.count('"end"') == 8 and {"0", "1", "2", "3"} <= set(found)
            return found if ended else None

        assert await wait_until(contexts) == ['"end"'] * 8 + ["0", "1", "2", "3"]
