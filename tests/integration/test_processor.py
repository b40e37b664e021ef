"""The processor adapter under faults, each in a process of its own, on a real broker."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.integration.processor_probe import NAME, PROBE, PROBE_REJECTED
from tests.waiting import wait_until

from penstock.kafka.connection import admin_client, create_topics, make_consumer, make_producer, running
from penstock.kafka.topics import service_group
from penstock.settings import Kafka

SCRIPT = Path(__file__).with_name("processor_probe.py")


@dataclass
class Running:
    """A probe process and what it has seen."""

    process: asyncio.subprocess.Process
    log: Path
    errors: Path

    def records(self) -> list[tuple[int, int, str]]:
        """(partition, offset, value) in the order in which the handler was given them."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(p), int(o), v) for p, o, v in (x.split() for x in lines if x[0] not in "+-")]

    def values(self) -> list[str]:
        return [value for _p, _o, value in self.records()]

    def owned(self) -> set[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        owned: set[str] = set()
        for line in lines:
            if line[0] == "+":
                owned.add(line[1:])
            elif line[0] == "-":
                owned.remove(line[1:])
        return owned

    async def seen(self, count: int) -> None:
        await wait_until(lambda: len(self.records()) >= count, what=f"{count} records in {self.log.name}")

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 40)

    def stderr(self) -> str:
        return self.errors.read_text()


class Stand:
    """Topics of one test, and the processes that it starts on them."""

    def __init__(self, settings: Kafka, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._started: list[Running] = []

    async def start(self, *, ready: bool = True, stall_timeout_s: float = 60.0, **order: Any) -> Running:
        number = len(self._started)
        log, mark = self._folder / f"log-{number}", self._folder / f"ready-{number}"
        errors = self._folder / f"stderr-{number}"
        order |= {
            "log": str(log),
            "settings": {
                "kafka": self.settings.kafka,
                "prefix": self.settings.prefix,
                "session_timeout_s": 6.0,
                "stall_timeout_s": stall_timeout_s,
            },
        }
        with errors.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(SCRIPT),
                json.dumps(order),
                env=os.environ | {"PENSTOCK_READY_FILE": str(mark), "PENSTOCK_LIBRARY_LOG_LEVEL": "CRITICAL"},
                cwd=self._folder,
                stderr=file,
            )
        started = Running(process, log, errors)
        self._started.append(started)
        if ready:
            await wait_until(lambda: mark.exists() or process.returncode is not None, what="ready")
            assert process.returncode is None, started.stderr()
        return started

    async def publish(self, values: range, partition: int | None = None) -> None:
        async with running(make_producer(self.settings)) as producer:
            for value in values:
                number = value % PROBE.partitions if partition is None else partition
                await producer.send(self.settings.prefix + PROBE.name, b"%d" % value, partition=number)

    async def committed(self) -> int:
        """The sum of the group's committed offsets: with nothing skipped, how many records are done."""
        async with admin_client(self.settings) as client:
            offsets = await client.list_consumer_group_offsets(service_group(self.settings.prefix, NAME))
        return sum(found.offset for found in offsets.values())

    async def all_committed(self, count: int) -> None:
        async def reached() -> bool:
            return await self.committed() == count

        await wait_until(reached, what=f"{count} records committed")

    async def close(self) -> None:
        for started in self._started:
            if started.process.returncode is None:
                started.process.kill()
                await started.process.wait()


@pytest.fixture
async def stand(kafka_servers: str, prefix: str, tmp_path: Path) -> AsyncIterator[Stand]:
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [PROBE, PROBE_REJECTED])
    stand = Stand(settings, tmp_path)
    try:
        yield stand
    finally:
        await stand.close()


def as_text(values: range) -> set[str]:
    return {str(value) for value in values}


async def test_a_record_held_back_is_delivered_again_after_kill_9(stand: Stand) -> None:
    """O1: everything behind the 150th record is settled; after kill -9 it comes again, and nothing is skipped."""
    await stand.publish(range(300), partition=0)
    first = await stand.start(hold=["150"])
    await first.seen(300)
    await stand.all_committed(150)
    first.process.kill()
    await first.ended()

    second = await stand.start()
    await stand.all_committed(300)
    assert second.values() == [str(value) for value in range(150, 300)]


@pytest.mark.parametrize("fault", ["fails", "exits"])
async def test_a_raising_handler_loses_nothing(stand: Stand, fault: str) -> None:
    """O1: an exception (sys.exit included) ends the process with a failure; the next one gets the record again."""
    await stand.publish(range(20), partition=1)
    first = await stand.start(ready=False, **{fault: ["7"]})
    assert await first.ended() == 1
    assert first.values() == [str(value) for value in range(8)], "nothing is taken after the failure"
    assert await stand.committed() == 7, "what was settled before is not repeated"

    second = await stand.start()
    await second.seen(13)
    assert second.values() == [str(value) for value in range(7, 20)]


async def test_an_invalid_record_is_parked_and_delays_nothing(stand: Stand) -> None:
    """T5: reason, position and original bytes are on the rejected topic; what is behind goes on."""
    await stand.publish(range(10), partition=2)
    probe = await stand.start(invalid=["3"])
    await stand.all_committed(10)
    assert probe.values() == [str(value) for value in range(10)]

    rejected = stand.settings.prefix + PROBE_REJECTED.name
    async with running(make_consumer(stand.settings, None, rejected)) as consumer:
        record = await asyncio.wait_for(consumer.getone(), 20)
    envelope = orjson.loads(record.value)
    assert envelope.pop("rejected_at")
    assert base64.b64decode(envelope.pop("original")) == b"3"
    assert envelope == {
        "reason": "not a number I like",
        "pointer": "/value",
        "topic": stand.settings.prefix + PROBE.name,
        "partition": 2,
        "offset": 3,
    }


async def test_a_server_that_is_away_is_waited_for_in_order(stand: Stand) -> None:
    """O1: Unavailable means the same record again, before any that is behind it."""
    await stand.publish(range(6), partition=0)
    probe = await stand.start(away=["2"])
    await stand.all_committed(6)
    assert probe.values() == ["0", "1", "2", "2", "2", "3", "4", "5"]


async def test_sigterm_drains_and_commits(stand: Stand) -> None:
    """O1: after SIGTERM the process ends with 0, has left nothing in its folder, and nothing is delivered again."""
    first = await stand.start()
    await stand.publish(range(200))
    await first.seen(200)
    first.process.send_signal(signal.SIGTERM)
    assert await first.ended() == 0, first.stderr()
    assert await stand.committed() == 200
    assert {path.name for path in first.log.parent.iterdir()} == {"log-0", "ready-0", "stderr-0"}

    second = await stand.start()
    await stand.publish(range(200, 204))
    await second.seen(4)
    assert set(second.values()) == as_text(range(200, 204))


async def test_a_record_that_is_never_settled_ends_the_process(stand: Stand) -> None:
    """O2a: the lookout; other partitions' progress does not hide it, and the message names the record."""
    await stand.publish(range(8))
    probe = await stand.start(hold=["5"], stall_timeout_s=3.0)
    assert await probe.ended() == 1
    assert "Stalled" in probe.stderr()
    assert "settling probe/1 from 1" in probe.stderr()


@pytest.mark.slow
async def test_an_idle_processor_does_not_stall(stand: Stand) -> None:
    """O2a: neither a member without records nor one without partitions is at a standstill."""
    stand.settings = Kafka(kafka=stand.settings.kafka, prefix=f"{stand.settings.prefix}one.")
    await create_topics(stand.settings, [dataclasses.replace(PROBE, partitions=1)])
    stall_timeout_s = 5.0
    members = [await stand.start(stall_timeout_s=stall_timeout_s) for _ in range(2)]
    await wait_until(lambda: sum(len(m.owned()) for m in members) == 1, what="one has the partition")
    # There is no condition to wait for: that nothing happens in one and a half times the limit is the claim.
    ends = [asyncio.ensure_future(member.process.wait()) for member in members]
    done, pending = await asyncio.wait(ends, timeout=stall_timeout_s * 1.5, return_when="FIRST_COMPLETED")
    assert not done, "".join(member.stderr() for member in members)
    await stand.close()
    await asyncio.gather(*pending)


async def test_a_blocked_event_loop_ends_the_process(stand: Stand) -> None:
    """O2a: the watchdog needs no loop; it names the line that blocks."""
    await stand.publish(range(1))
    probe = await stand.start(ready=False, blocks=["0"], stall_timeout_s=4.0)
    assert await probe.ended() == 1
    assert "processor_probe.py" in probe.stderr()


@pytest.mark.slow
async def test_kill_9_of_one_of_two_members(stand: Stand) -> None:
    """O1: the survivor takes over, and every record is seen at least once."""
    one, two = await stand.start(), await stand.start()
    await wait_until(lambda: len(one.owned()) == 2 and len(two.owned()) == 2, what="two partitions each")
    await stand.publish(range(400))
    await two.seen(10)
    two.process.kill()
    await stand.publish(range(400, 800))
    await stand.all_committed(800)
    assert one.owned() == {"0", "1", "2", "3"}
    assert set(one.values()) | set(two.values()) == as_text(range(800))


@pytest.mark.slow
async def test_members_that_come_and_go_lose_nothing(stand: Stand) -> None:
    """O1: rebalances in quick succession, before the first commit and under load."""
    await stand.publish(range(2_000))
    members = [await stand.start(ready=False)]
    for start in range(2_000, 6_000, 1_000):
        members.append(await stand.start())
        await stand.publish(range(start, start + 1_000))
        leaver = members.pop(0)
        leaver.process.send_signal(signal.SIGTERM)
        assert await leaver.ended() == 0, leaver.stderr()
    await stand.all_committed(6_000)
    seen = {value for started in stand._started for value in started.values()}
    assert seen == as_text(range(6_000))


async def test_a_missing_topic_is_named(stand: Stand) -> None:
    """O2a: instead of waiting for ever for a topic that nobody creates."""
    stand.settings = Kafka(kafka=stand.settings.kafka, prefix=f"{stand.settings.prefix}other.")
    probe = await stand.start(ready=False)
    assert await probe.ended() == 5
    assert f"no such topic: {stand.settings.prefix}probe" in probe.stderr()
