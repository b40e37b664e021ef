"""Share groups (KIP-932) and the classic groups by which workers claim, on one broker.

    make bench-share-groups          # also installs benchmarks/requirements.txt
    python -m benchmarks.share_groups [--rate 240] [--seconds 15] [--records 200]

Two members, each a process, read one topic of four partitions. Three ways to claim:

- `classic, each poll`: write one claim, await it, commit the offsets, await that (aiokafka);
- `classic, 100 ms`: the record begins at once, claims and commits follow every 100 ms (aiokafka);
- `share group`: accept the records of a poll, await the answer (librdkafka's preview client).

The first part sends records at a pace. It measures the CPU of broker and members for each record,
and the time until the work of a record may begin. The second part sends
one record that keeps its member busy, then further records, and counts how many of them the other
member, which is idle, could take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks.measurements import CpuMeter, percentile, report
from penstock.local.broker import NAME, EmbeddedKafka
from penstock.local.supervisor import Supervisor

MEMBERS = 2
PARTITIONS = 4
CLAIMS = "claims"
LINGER_S = 0.1
WAYS = ("classic, each poll", "classic, 100 ms", "share group")
SHARE = WAYS[2]
# A member that has this record works until the benchmark ends.
BUSY = b"busy"
# The lines that a member prints for the benchmark.
READY, BEGUN = "ready", "begun"


def topic_of(way: str, part: str) -> str:
    """The topic of a way and a part; its group has the same name."""
    return f"{way.replace(', ', '-').replace(' ', '-')}.{part}"


def tell(kind: str, value: object = None) -> None:
    """Prints one line for the benchmark."""
    print(json.dumps([kind, value]), flush=True)


def begin(value: bytes) -> None:
    """Begins the work of a record, which keeps the member busy or ends at once."""
    sent_s = float(value.split()[-1])
    tell(BEGUN, (time.time() - sent_s) * 1000)
    if value.startswith(BUSY):
        time.sleep(3600)


async def be_classic(servers: str, topic: str, *, at_each_poll: bool) -> None:
    """A member of a classic group."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=servers,
        group_id=topic,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    producer = AIOKafkaProducer(bootstrap_servers=servers, acks="all", enable_idempotence=True)
    await consumer.start()
    await producer.start()
    while not consumer.assignment():
        await asyncio.sleep(0.05)
    tell(READY)
    positions: dict[TopicPartition, int] = {}

    async def claim() -> None:
        claimed, held = dict(positions), len(positions)
        positions.clear()
        if held:
            await producer.send_and_wait(CLAIMS, b"claim")
            await consumer.commit(claimed)

    claimed_s = time.monotonic()
    while True:
        # Less than the pause between claims: an idle member claims what it has begun, too.
        fetched = await consumer.getmany(timeout_ms=int(LINGER_S * 1000))
        values = []
        for partition, records in fetched.items():
            positions[partition] = records[-1].offset + 1
            values += [record.value for record in records]
        busy = any(value.startswith(BUSY) for value in values)
        if at_each_poll or busy or time.monotonic() - claimed_s >= LINGER_S:
            await claim()
            claimed_s = time.monotonic()
        for value in sorted(values, key=lambda value: value.startswith(BUSY)):
            begin(value)


def be_share(servers: str, topic: str) -> None:
    """A member of a share group."""
    from confluent_kafka import ShareConsumer  # noqa: PLC0415 (only benchmarks/requirements.txt has it)

    consumer = ShareConsumer(
        {"bootstrap.servers": servers, "group.id": topic, "share.acknowledgement.mode": "explicit"}
    )
    consumer.subscribe([topic])
    tell(READY)
    while True:
        polled = [message for message in consumer.poll(1.0) if message.error() is None]
        for message in polled:
            consumer.acknowledge(message)
        if polled:
            consumer.commit_sync(30.0)
        for value in sorted(map(_value, polled), key=lambda value: value.startswith(BUSY)):
            begin(value)


def _value(message: Any) -> bytes:
    value: bytes = message.value()
    return value


class Members:
    """The two members of one way, each a process.

    Args:
        way: one of WAYS.
        servers: of the broker.
        topic: that they read.
    """

    def __init__(self, way: str, servers: str, topic: str) -> None:
        self._arguments = ["-m", "benchmarks.share_groups", "--member", way, servers, topic]
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.ready = 0
        self.begun: list[list[float]] = []

    async def start(self) -> None:
        """Starts both, and waits until each has joined the group."""
        for number in range(MEMBERS):
            process = await asyncio.create_subprocess_exec(
                sys.executable, *self._arguments, stdout=asyncio.subprocess.PIPE
            )
            self._processes.append(process)
            self.begun.append([])
            self._readers.append(asyncio.create_task(self._read(process, number)))
        await self.wait(lambda: self.ready == MEMBERS)

    async def _read(self, process: asyncio.subprocess.Process, number: int) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            kind, value = json.loads(line)
            if kind == READY:
                self.ready += 1
            else:
                self.begun[number].append(value)
            self._changed.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def count(self) -> int:
        """Records that have begun."""
        return sum(map(len, self.begun))

    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    async def close(self) -> None:
        """Ends both at once."""
        for process in self._processes:
            process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)


async def warm_up(producer: AIOKafkaProducer, members: Members, topic: str) -> None:
    """Sends records until each member takes some: a share group begins after its start."""
    while not all(members.begun):
        for number in range(PARTITIONS):
            await producer.send_and_wait(topic, f"{time.time()}".encode(), partition=number)
        await asyncio.sleep(0.2)
    settled = -1
    while members.count() != settled:
        settled = members.count()
        await asyncio.sleep(1.0)
    for values in members.begun:
        values.clear()


async def cost(
    way: str, servers: str, broker: int, producer: AIOKafkaProducer, rate: int, seconds: float
) -> dict[str, Any]:
    """Sends records at a pace; returns CPU milliseconds for each, and latencies."""
    topic = topic_of(way, "cost")
    members = Members(way, servers, topic)
    await members.start()
    await warm_up(producer, members, topic)
    broker_cpu, member_cpu = CpuMeter([broker]), CpuMeter(members.pids())
    records, begun_s = int(rate * seconds), time.monotonic()
    for number in range(records):
        await asyncio.sleep(begun_s + number / rate - time.monotonic())
        await producer.send(topic, f"{time.time()}".encode(), partition=number % PARTITIONS)
    await members.wait(lambda: members.count() >= records)
    used = broker_cpu.seconds(), member_cpu.seconds()
    latencies = [value for values in members.begun for value in values]
    await members.close()
    return {
        "broker ms/record": round(used[0] / records * 1000, 2),
        "members ms/record": round(used[1] / records * 1000, 2),
        "p50 ms": round(percentile(latencies, 0.5), 1),
        "p99 ms": round(percentile(latencies, 0.99), 1),
    }


async def behind(way: str, servers: str, producer: AIOKafkaProducer, records: int) -> int:
    """Sends records while one member is busy; returns how many the idle one did not take."""
    topic = topic_of(way, "behind")
    members = Members(way, servers, topic)
    await members.start()
    await warm_up(producer, members, topic)
    await producer.send_and_wait(topic, BUSY + f" {time.time()}".encode(), partition=0)
    await members.wait(lambda: members.count() == 1)
    for number in range(records):
        await producer.send_and_wait(topic, f"{time.time()}".encode(), partition=number % PARTITIONS)
    settled = 0
    while members.count() != settled:
        settled = members.count()
        # Longer than the pause between any two polls of an idle member.
        await asyncio.sleep(5.0)
    await members.close()
    return records + 1 - settled


async def measure(
    supervisor: Supervisor, folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measures all ways in turn on one broker."""
    broker = EmbeddedKafka(supervisor, folder / "kafka")
    await broker.start()
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.servers)
    await admin.start()
    names = [topic_of(way, part) for way in WAYS for part in ("cost", "behind")]
    await admin.create_topics([NewTopic(CLAIMS, 1, 1), *(NewTopic(name, PARTITIONS, 1) for name in names)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=broker.servers, acks="all", enable_idempotence=True)
    await producer.start()
    figures: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        figures[way] = await cost(
            way, broker.servers, supervisor.processes()[NAME], producer, options.rate, options.seconds
        )
        not_taken = await behind(way, broker.servers, producer, options.records)
        figures[way][f"not taken of {options.records}"] = not_taken
    await producer.stop()
    return figures


async def main(options: argparse.Namespace) -> int:
    """Runs all ways in turn on one broker."""
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(lambda _name, _line: None, run_dir=Path(folder) / "run")
        with closing(supervisor):
            figures = await measure(supervisor, Path(folder), options)
    today, shared = figures[WAYS[0]], figures[SHARE]
    ratio = shared["broker ms/record"] / today["broker ms/record"]
    held = shared[f"not taken of {options.records}"]
    claims = {
        "a share group costs the broker more than a claim at each poll": (f"{ratio:.2f} times", ratio > 1),
        "records wait behind a busy member of a share group": (f"{held} of {options.records}", held > 0),
    }
    return report("share_groups", figures, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.member is None:
        sys.exit(asyncio.run(main(parsed)))
    way, servers, topic = parsed.member
    if way == SHARE:
        be_share(servers, topic)
    else:
        asyncio.run(be_classic(servers, topic, at_each_poll=way == WAYS[0]))
