"""The processor adapter under faults: each runs in its own process, on a real broker."""

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
from tests.support.processor_probe import NAME, PROBE, PROBE_REJECTED
from tests.support.waiting import in_time, wait_until

from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.topology import group_members
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import service_group
from penstock.settings import Kafka

SCRIPT = Path(__file__).parents[2] / "support" / "processor_probe.py"


@dataclass
class Running:
    """A probe process and the records that it has handled."""

    process: asyncio.subprocess.Process
    log: Path
    errors: Path

    def records(self) -> list[tuple[int, int, str]]:
        """Returns (partition, offset, value) in the order in which the handler received them."""
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
        return await in_time(self.process.wait())

    def stderr(self) -> str:
        return self.errors.read_text()


class Stand:
    """The topics of one test, and the processes that the test starts on them."""

    def __init__(self, settings: Kafka, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._started: list[Running] = []

    async def start(self, *, ready: bool = True, stall_timeout_s: float = 60.0, **options: Any) -> Running:
        number = len(self._started)
        log, ready_file = self._folder / f"log-{number}", self._folder / f"ready-{number}"
        errors = self._folder / f"stderr-{number}"
        options |= {
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
                json.dumps(options),
                env=os.environ
                | {"PENSTOCK_READY_FILE": str(ready_file), "PENSTOCK_LIBRARY_LOG_LEVEL": "CRITICAL"},
                cwd=self._folder,
                stderr=file,
            )
        started = Running(process, log, errors)
        self._started.append(started)
        if ready:
            await wait_until(lambda: ready_file.exists() or process.returncode is not None, what="ready")
            assert process.returncode is None, started.stderr()
        return started

    async def publish(self, values: range, partition: int | None = None) -> None:
        async with running(make_producer(self.settings)) as producer:
            for value in values:
                number = value % PROBE.partitions if partition is None else partition
                await producer.send(self.settings.prefix + PROBE.name, b"%d" % value, partition=number)

    async def committed(self) -> int:
        """Returns the sum of the group's committed offsets, which counts the settled records."""
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


async def test_an_unsettled_record_is_delivered_again_after_kill_9(stand: Stand) -> None:
    """O1: the handler settles every record but 150. After kill -9 the next process handles
    that record and all later ones again."""
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
    """O1: an exception, `sys.exit` included, ends the process with status 1. The next process
    handles the record again."""
    await stand.publish(range(20), partition=1)
    first = await stand.start(ready=False, **{fault: ["7"]})
    assert await first.ended() == 1
    assert first.values() == [str(value) for value in range(8)], (
        "the handler receives no record after the failure"
    )
    assert await stand.committed() == 7, "records settled before the failure are committed"

    second = await stand.start()
    await second.seen(13)
    assert second.values() == [str(value) for value in range(7, 20)]


async def test_an_invalid_record_is_rejected_and_delays_no_other(stand: Stand) -> None:
    """T5: the processor writes an invalid record to the rejected topic, with reason, position and
    original bytes. Later records continue."""
    await stand.publish(range(10), partition=2)
    probe = await stand.start(invalid=["3"])
    await stand.all_committed(10)
    assert probe.values() == [str(value) for value in range(10)]

    rejected = stand.settings.prefix + PROBE_REJECTED.name
    async with running(make_consumer(stand.settings, None, rejected)) as consumer:
        record = await in_time(consumer.getone())
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


async def test_the_processor_retries_an_unavailable_server_in_order(stand: Stand) -> None:
    """O1: after Unavailable the processor handles the same record again, before any later
    record."""
    await stand.publish(range(6), partition=0)
    probe = await stand.start(away=["2"])
    await stand.all_committed(6)
    assert probe.values() == ["0", "1", "2", "2", "2", "3", "4", "5"]


async def test_sigterm_drains_and_commits(stand: Stand) -> None:
    """O1: after SIGTERM the process ends with status 0 and leaves no files behind. No record is
    delivered again."""
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
    """O2a: the stall detector ends the process although other partitions progress. The message
    names the record."""
    await stand.publish(range(8))
    probe = await stand.start(hold=["5"], stall_timeout_s=3.0)
    assert await probe.ended() == 1
    assert "Stalled" in probe.stderr()
    assert "settling probe/1 from 1" in probe.stderr()


async def test_an_idle_processor_does_not_stall(stand: Stand) -> None:
    """O2a: the stall detector ends neither a member without records nor one without partitions."""
    stand.settings = Kafka(kafka=stand.settings.kafka, prefix=f"{stand.settings.prefix}one.")
    await create_topics(stand.settings, [dataclasses.replace(PROBE, partitions=1)])
    stall_timeout_s = 5.0
    members = [await stand.start(stall_timeout_s=stall_timeout_s) for _ in range(2)]
    await wait_until(lambda: sum(len(m.owned()) for m in members) == 1, what="one member has the partition")
    # Wait one and a half times the limit: the claim is that no member ends.
    ends = [asyncio.ensure_future(member.process.wait()) for member in members]
    done, pending = await asyncio.wait(ends, timeout=stall_timeout_s * 1.5, return_when="FIRST_COMPLETED")
    assert not done, "".join(member.stderr() for member in members)
    await stand.close()
    await asyncio.gather(*pending)


async def test_a_blocked_event_loop_ends_the_process(stand: Stand) -> None:
    """O2a: the watchdog runs on its own thread, ends the process, and names the blocked line."""
    await stand.publish(range(1))
    probe = await stand.start(ready=False, blocks=["0"], stall_timeout_s=4.0)
    assert await probe.ended() == 1
    assert "processor_probe.py" in probe.stderr()


async def test_a_member_that_stops_while_it_joins_leaves_its_group(stand: Stand) -> None:
    """O3: a process that was frozen, joins its group again and stops meanwhile holds up the other
    members no further: it is no member once it has ended."""
    stayer, frozen = await stand.start(), await stand.start()
    group = service_group(stand.settings.prefix, NAME)

    async def has_members(count: int) -> bool:
        return await group_members.count(stand.settings, group) == count

    await wait_until(lambda: len(stayer.owned()) == 2, what="two partitions each")
    frozen.process.send_signal(signal.SIGSTOP)
    await wait_until(lambda: len(stayer.owned()) == 4, what="the other one has all partitions")
    # It cannot answer, so that the group waits for it.
    stayer.process.send_signal(signal.SIGSTOP)
    frozen.process.send_signal(signal.SIGCONT)
    await wait_until(lambda: has_members(2), what="the frozen one joins again")
    frozen.process.send_signal(signal.SIGTERM)
    await wait_until(lambda: "process_stopping" in frozen.stderr(), what="it stops")
    stayer.process.send_signal(signal.SIGCONT)
    assert await frozen.ended() == 0, frozen.stderr()
    assert await has_members(1)


async def test_joining_and_leaving_members_lose_no_record(stand: Stand) -> None:
    """O1: rebalances in quick succession lose no record, before the first commit and under load."""
    await stand.publish(range(2_000))
    members = [await stand.start(ready=False)]
    for start in range(2_000, 6_000, 1_000):
        members.append(await stand.start())
        await stand.publish(range(start, start + 1_000))
        leaving = members.pop(0)
        leaving.process.send_signal(signal.SIGTERM)
        assert await leaving.ended() == 0, leaving.stderr()
    await stand.all_committed(6_000)
    seen = {value for started in stand._started for value in started.values()}
    assert seen == as_text(range(6_000))


async def test_a_missing_topic_is_named(stand: Stand) -> None:
    """O2a: a processor whose topic is missing names the topic, and begins once it exists."""
    stand.settings = Kafka(kafka=stand.settings.kafka, prefix=f"{stand.settings.prefix}other.")
    probe = await stand.start(ready=False)
    missing = f"no such topic: {stand.settings.prefix}probe"
    await wait_until(lambda: missing in probe.stderr())
    await create_topics(stand.settings, [PROBE, PROBE_REJECTED])
    await stand.publish(range(1), partition=0)
    await wait_until(lambda: probe.values() == ["0"])
