"""The bytes that a task leaves in topics, by topic, and what compression would save and cost.

    python -m benchmarks.topics [--rate 80] [--seconds 20] [--tasks 20000]
        [--compression producer gzip]

Tasks of three no-op stages have contexts of 200 bytes, most of them random hexadecimal digits. They
are submitted one by one over HTTP at a rate, and then at once to the topic `submitted`. Each value
of `--compression` is a deployment whose topics have it as `compression.type`. The broker then
compresses what it receives; `producer` is the default and compresses nothing.

The batches of the first deployment are also compressed and decompressed here, by each codec that
aiokafka finds, as producers and consumers would do. lz4 and zstd need the package cramjam. A batch
that would become larger stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiokafka import codec

from benchmarks.growth import MEASURED, now, succeeded
from benchmarks.loops import Whole, everything, whole
from benchmarks.measurements import CpuMeter, report
from benchmarks.part_load import WARM_UP_S, at_rate
from benchmarks.throughput import SUBMIT_BATCH
from penstock.client import Client
from penstock.kafka.client.compression import LEVEL
from penstock.local.deployment import Deployment

# The topics that each task has records in.
COMPRESSED = ("submitted", "ready", "heartbeats", "stage-results", "events")
OFFSETS = "consumer offsets"
# Before the records of a batch: offset, length, and the rest of the header of version 2.
_PREFIX = struct.Struct(">qi")
_HEADER = 61

Figures = dict[str, float]


@dataclass(frozen=True)
class Batch:
    """A batch of records in a topic: the bytes before the records, and the records."""

    topic: str
    header: bytes
    records: bytes

    @property
    def count(self) -> int:
        """Number of records."""
        return int.from_bytes(self.header[57:61], "big")


@dataclass(frozen=True)
class Codec:
    """Compresses and decompresses the records of a batch."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def codecs() -> dict[str, Codec]:
    """The codecs that aiokafka finds, by name."""
    found = {"gzip": Codec(partial(codec.gzip_encode, compresslevel=LEVEL), codec.gzip_decode)}
    if codec.has_lz4():
        found["lz4"] = Codec(codec.lz4_encode, codec.lz4_decode)
    if codec.has_zstd():
        found["zstd"] = Codec(codec.zstd_encode, codec.zstd_decode)
    return found


def context() -> dict[str, object]:
    """A context of 200 bytes."""
    return {"at": time.time(), "pad": secrets.token_hex(80)}


def sizes(folder: Path) -> dict[Path, int]:
    """Bytes of each segment of the broker."""
    logs = (folder / "kafka").rglob("[0-9]*.log")
    return {log: log.stat().st_size for log in logs if not log.parent.name.startswith("__cluster")}


def batches(before: Mapping[Path, int], after: Mapping[Path, int], prefix: str) -> Iterator[Batch]:
    """The batches that were written meanwhile."""
    for log, end in after.items():
        name = log.parent.name.rpartition("-")[0].removeprefix(prefix)
        topic = OFFSETS if name.startswith("__") else "ready" if name.startswith("ready.") else name
        data = memoryview(log.read_bytes())[before.get(log, 0) : end]
        while data:
            _offset, length = _PREFIX.unpack_from(data)
            batch, data = data[: _PREFIX.size + length], data[_PREFIX.size + length :]
            yield Batch(topic, bytes(batch[:_HEADER]), bytes(batch[_HEADER:]))


def by_topic(found: Sequence[Batch], tasks: int) -> Figures:
    """Bytes a task, by topic and in all."""
    totals: Counter[str] = Counter(dict.fromkeys((*COMPRESSED, OFFSETS), 0))
    for batch in found:
        totals[batch.topic if batch.topic in totals else "others"] += len(batch.header) + len(batch.records)
    row = {topic: round(total / tasks, 1) for topic, total in totals.items() if topic != "others"}
    return {**row, "others": round(totals["others"] / tasks, 1), "all": round(totals.total() / tasks, 1)}


def records_a_batch(found: Sequence[Batch]) -> Figures:
    """Records in a batch, by topic."""
    records: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for batch in found:
        records[batch.topic] += batch.count
        count[batch.topic] += 1
    return {topic: round(records[topic] / max(1, count[topic]), 1) for topic in COMPRESSED}


def recompressed(found: Sequence[Batch], tasks: int, one: Codec) -> Figures:
    """Bytes a task that a codec would leave, and its CPU in microseconds a task."""
    chosen = [batch for batch in found if batch.topic in COMPRESSED]
    begin = time.process_time()
    small = [one.compress(batch.records) for batch in chosen]
    compressed = time.process_time()
    for data in small:
        one.decompress(data)
    end = time.process_time()
    left: Counter[str] = Counter()
    for batch, data in zip(chosen, small, strict=True):
        left[batch.topic] += len(batch.header) + min(len(data), len(batch.records))
    return {
        **{topic: round(left[topic] / tasks, 1) for topic in COMPRESSED},
        "all": round(left.total() / tasks, 1),
        "compress (µs)": round((compressed - begin) * 1e6 / tasks, 1),
        "decompress once (µs)": round((end - compressed) * 1e6 / tasks, 1),
    }


async def send(loop: Whole, tasks: int) -> None:
    """Submits tasks to the topic, and waits for their ends."""
    since = await now(loop)
    for begin in range(0, tasks, SUBMIT_BATCH):
        await loop.submit([context() for _ in range(min(SUBMIT_BATCH, tasks - begin))])
    await succeeded(loop, MEASURED, tasks, since)


async def measure(
    compression: str, rate: float, seconds: float, tasks: int
) -> tuple[Figures, dict[str, tuple[list[Batch], int]]]:
    """Measures a deployment; returns the CPU, and the batches with the number of tasks, by load."""
    found: dict[str, tuple[list[Batch], int]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        declared = [
            f'[topics."{topic}"]\nconfig = {{ "compression.type" = "{compression}" }}' for topic in COMPRESSED
        ]
        (folder / "topics.toml").write_text("\n".join(declared))
        options = dataclasses.replace(
            everything(folder / "data"), environment={"PENSTOCK_TOPICS_FILE": str(folder / "topics.toml")}
        )
        async with (
            Deployment(options) as deployment,
            whole(deployment, types=(MEASURED,)) as loop,
            Client(deployment.gateway_url) as client,
        ):
            prefix = deployment.environment["PENSTOCK_PREFIX"]

            async def one() -> None:
                await client.submit(MEASURED, context())

            await send(loop, 1)
            await at_rate(rate, WARM_UP_S, one)
            before, since, meter = sizes(folder / "data"), await now(loop), CpuMeter(loop.pids)
            count = await at_rate(rate, seconds, one)
            await succeeded(loop, MEASURED, count, since)
            cpu = {"paced, CPU ms/task": meter.seconds() * 1000 / count}
            found["paced"] = (list(batches(before, sizes(folder / "data"), prefix)), count)
            await send(loop, 1000)
            before, meter = sizes(folder / "data"), CpuMeter(loop.pids)
            await send(loop, tasks)
            cpu["full, CPU ms/task"] = meter.seconds() * 1000 / tasks
            found["full"] = (list(batches(before, sizes(folder / "data"), prefix)), tasks)
    return {name: round(value, 3) for name, value in cpu.items()}, found


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=80)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tasks", type=int, default=20_000, help="at full load")
    parser.add_argument("--compression", nargs="+", default=["producer", "gzip"])
    given = parser.parse_args()
    figures: dict[str, Figures] = {}
    for number, compression in enumerate(given.compression):
        cpu, loads = asyncio.run(measure(compression, given.rate, given.seconds, given.tasks))
        figures[f"{compression}: all processes"] = cpu
        for load, (found, tasks) in loads.items():
            figures[f"{compression}, {load}: bytes a task"] = by_topic(found, tasks)
            if number:
                continue
            figures[f"{load}: records a batch"] = records_a_batch(found)
            for name, one in codecs().items():
                figures[f"{load}, by a producer with {name}: bytes a task"] = recompressed(found, tasks, one)
    return report("topics", figures, {})


if __name__ == "__main__":
    sys.exit(main())
