"""A database that went back: the check names the tasks that only Kafka knows."""

import json

from click.testing import CliRunner
from tests.integration.checks.test_checks import record
from tests.support.services import make_topics, write

from penstock.checks.app import check
from penstock.checks.report import Report
from penstock.cli.main import cli
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform


async def test_tasks_that_only_kafka_knows_are_named(kafka_servers, prefix, database):
    """O2b, O10: a task was released and another one has ended, and neither is in the database: it
    went back. The check names both and no other, and stays clean, since nothing can be repaired."""
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    settings = Platform(kafka=kafka_servers, prefix=prefix, postgres=database)
    async with open_pool(database, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        drafts = [Submission(type="t", context=Context.encode(n)) for n in range(4)]
        released, ended, *kept = [task.id for task in await tasks.submit(pool, drafts)]
        named = [json.dumps({"event": "task.succeeded", "task": {"id": task}}) for task in (ended, kept[0])]
        await write(kafka_servers, f"{prefix}events", b"?", b"[]", *(text.encode() for text in named))
        await write(kafka_servers, f"{prefix}ready.t", b"?", record(released), record(kept[1]))
        assert (await check(settings)).missing == []
        await pool.execute("DELETE FROM task WHERE id = ANY ($1::bigint[])", [released, ended])
    report = await check(settings)
    assert report.missing == [released, ended]
    assert report.clean


def test_the_command_line_prints_them(monkeypatch):
    """The text names how many are missing, and the first of them."""

    async def found(*_given, **_options):
        return Report(missing=[5, 7])

    monkeypatch.setattr("penstock.checks.app.check", found)
    printed = CliRunner().invoke(cli, ["check", "--kafka", "localhost:1", "--postgres", "postgresql://x/y"])
    assert "missing, since the database went back: 2, 5, 7" in printed.output
    assert printed.exit_code == 0
