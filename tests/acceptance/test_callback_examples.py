"""examples/callbacks, as a reader runs them: as processes, against a real broker and the real service."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.contracts.event import Event
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import EVENTS
from penstock.local.ports import answers, choose_port
from tests.callback_targets import OLD_SECRET, SECRET, Bench, bench, owed
from tests.waiting import wait_until


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as made:
        await create_topics(made.kafka, [EVENTS])
        yield made


class Running:
    """An example; `lines` is what it has printed of events, beside what libraries log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith((b"done ", b"again ")):
                self.lines.append(line.decode().strip())


@asynccontextmanager
async def example(name: str, *arguments: str) -> AsyncIterator[Running]:
    """Runs an example until the end of the block, where it is killed: no time to clean up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"examples.callbacks.{name}",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    running = Running(process)
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        process.kill()
        await process.wait()
        await reading


def effects(file: Path) -> dict[str, str]:
    with sqlite3.connect(file) as database:
        found = dict(database.execute("SELECT id, what FROM effect").fetchall())
    database.close()
    return found


def event(number: int) -> Event:
    task: dict[str, Any] = {"id": number, "type": "order", "state": "succeeded"}
    return Event(
        id=f"{number}-0-0-succeeded", name="task.succeeded", at=datetime.now(UTC), task=task, detail={}
    )


async def test_the_consumer_acts_once_on_each_event(platform: Bench, tmp_path: Path) -> None:
    """Issue 5: events that come twice, before and after a kill -9 of the consumer, take effect once each; none is
    missed."""
    topic = platform.kafka.prefix + EVENTS.name
    arguments = (
        "--kafka",
        platform.kafka.kafka,
        "--prefix",
        platform.kafka.prefix,
        "--effects",
        str(tmp_path / "db"),
    )

    async def publish(*numbers: int) -> None:
        for number in numbers:
            await platform.producer.send_and_wait(topic, event(number).encode(), key=str(number).encode())

    async with example("consumer", *arguments) as first:
        await publish(1, 2, 2, 3)
        await wait_until(lambda: len(first.lines) >= 4, what="four records read")
    assert Counter(line.split()[0] for line in first.lines) == {"done": 3, "again": 1}
    await publish(3, 4, 5)
    async with example("consumer", *arguments) as second:
        # A killed member's partitions are given away when its session has timed out.
        await wait_until(lambda: len(effects(tmp_path / "db")) == 5, timeout=60, what="five effects")
    assert "done  4-0-0-succeeded task.succeeded" in second.lines
    assert effects(tmp_path / "db")["5-0-0-succeeded"] == "task 5: task.succeeded"


async def test_the_receiver_takes_what_is_signed_and_nothing_else(platform: Bench, tmp_path: Path) -> None:
    """C7: callbacks of the real service, signed with a new and an old secret, are taken by a receiver that knows either;
    a forged one gets 401 and no effect; a repeated one takes effect once."""
    for secret, number in ((SECRET, 1), (OLD_SECRET, 2)):
        port = choose_port()
        url = f"http://127.0.0.1:{port}/hooks"
        file = tmp_path / f"{number}.db"
        other = "whsec_" + base64.b64encode(b"other" * 6).decode()
        arguments = ("--secret", other, "--secret", secret, "--port", str(port), "--effects", str(file))
        async with (
            example("receiver", *arguments) as receiver,
            platform.service(callback_secrets=(SECRET, OLD_SECRET)),
        ):
            await wait_until(lambda port=port: answers(port), what="the receiver listens")
            callback = owed(url, number)
            async with aiohttp.ClientSession() as session:
                forged = {"webhook-id": callback.id, "webhook-timestamp": "1", "webhook-signature": "v1,x"}
                async with session.post(url, data=callback.body, headers=forged) as answer:
                    assert answer.status == 401
            assert effects(file) == {}
            await platform.owe(callback)
            await wait_until(platform.all_delivered)
            assert effects(file) == {callback.id: f"task {number}: task.succeeded"}
            await platform.connection.execute(
                "UPDATE callback SET state = 'pending', finished_at = NULL, due_at = now() WHERE id = $1",
                callback.id,
            )
            await platform.publish(owed(url, number, attempt=1))
            await wait_until(lambda lines=receiver.lines: len(lines) == 2)
            await wait_until(platform.all_delivered)
        assert [line.split()[0] for line in receiver.lines] == ["done", "again"]


async def test_kafkas_own_console_tool_reads_events_beside_the_embedded_broker(platform: Bench) -> None:
    """Issue 5: the command of docs/callbacks.md prints an event, to the byte, and ends with the tool's own status."""
    topic = platform.kafka.prefix + EVENTS.name
    await platform.producer.send_and_wait(topic, event(7).encode(), key=b"7")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.local.tools",
        "console-consumer",
        "--bootstrap-server",
        platform.kafka.kafka,
        "--topic",
        topic,
        "--from-beginning",
        "--max-messages",
        "1",
        "--timeout-ms",
        "60000",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said
    assert json.loads(printed.splitlines()[0])["id"] == "7-0-0-succeeded"


@pytest.mark.parametrize("arguments", [[], ["console-eater"]])
async def test_an_unknown_tool_is_refused(arguments: list[str]) -> None:
    """O8: the usage, and status 2 for a wrong command line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.local.tools", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _printed, said = await process.communicate()
    assert process.returncode == 2
    assert b"console-consumer" in said
