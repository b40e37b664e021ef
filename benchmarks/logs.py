"""Task logs: what they cost handlers, workers and the service `tasklogs`, and how soon lines come.

    python -m benchmarks.logs [--short]

One worker at a time, on one deployment. Costs are ratios of one run: to a `FileHandler`, to a
handler that logs nothing, to the time with Kafka, to stages without lines. `--short` has fewer
lines, rounds and seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
from aiokafka.codec import gzip_encode

from benchmarks import throughput
from benchmarks.log_deployment import SEGMENT_S, Logs, Sizes
from benchmarks.log_worker import TYPES
from benchmarks.loops import everything, whole
from benchmarks.measurements import percentile, report
from penstock.client import Client
from penstock.core.attempt import AttemptId
from penstock.core.redaction import Redactor
from penstock.kafka.client.compression import LEVEL
from penstock.local.deployment import Deployment, Options
from penstock.worker.capture import capturing
from penstock.worker.current import attempt_scope
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.log_shipper import FLUSH_MOST_BYTES, records_of
from penstock.worker.outcomes import Task

SHORT = Sizes(5_000, 15, 5, 50, 60, 10, 4_000, 1)


def emit_cost(calls: int) -> dict[str, float]:
    """CPU microseconds of a call of `log.info`, with a `FileHandler` and with the log of a task.

    `shipping` is what a line then takes until it is sent: to redact, encode and compress it.
    """
    with tempfile.TemporaryDirectory() as folder:
        loggers = {name: logging.getLogger(f"benchmark.{name}") for name in ("file", "task", "nothing")}
        handlers = {
            "file": logging.FileHandler(Path(folder) / "log"),
            "nothing": logging.NullHandler(),
        }
        for name, handler in handlers.items():
            loggers[name].addHandler(handler)
            loggers[name].propagate = False
        for logger in loggers.values():
            logger.setLevel(logging.INFO)
        buffer = LogBuffer("w", Redactor(os.environ), lambda _urgent: None)
        found: dict[str, list[float]] = {name: [] for name in (*loggers, "shipping")}
        with capturing("only"):
            # A run has a bound of lines a second after its first 10,000.
            for number in range(max(2, calls // 5_000)):
                run = buffer.begin(AttemptId(number, 0, 0))
                with attempt_scope(Task(number, "t", "s", 0, 0, 0, None, run_log=run)):
                    for name, logger in loggers.items():
                        begin_s = time.thread_time()
                        for line in range(5_000):
                            logger.info("line %d of the log, of the usual length for such a line", line)
                        found[name].append((time.thread_time() - begin_s) / 5_000 * 1e6)
                run.end("done")
                begin_s = time.thread_time()
                while buffer:
                    for value in records_of("w", buffer.take(FLUSH_MOST_BYTES)):
                        gzip_encode(value, LEVEL)
                found["shipping"].append((time.thread_time() - begin_s) / 5_000 * 1e6)
        handlers["file"].close()
    return {name: median(values) for name, values in found.items()}


def options(folder: Path) -> Options:
    """A deployment whose segments close soon."""
    return Options(
        data_dir=folder,
        kafka_port=0,
        postgres_port=0,
        gateway_port=0,
        environment={"PENSTOCK_LOGS_SEGMENT_S": str(SEGMENT_S)},
    )


async def rate_of(lines: int, tasks: int) -> dict[str, float]:
    """Tasks a second of three no-op stages, each of which logs so many lines, and their CPU."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            Deployment(everything(Path(folder))) as deployment,
            whole(deployment, lines=lines) as loop,
        ):
            return await throughput.measure(loop, tasks)


async def run(sizes: Sizes) -> int:
    """Measures everything and reports."""
    emit = emit_cost(sizes.calls)
    rates: dict[int, list[dict[str, float]]] = {0: [], 3: []}
    for _ in range(sizes.rounds):
        for lines, found in rates.items():
            found.append(await rate_of(lines, sizes.tasks))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        async with (
            Deployment(options(Path(name))) as deployment,
            Client(deployment.gateway_url) as client,
        ):
            connection = await asyncpg.connect(deployment.postgres)
            for type_name in TYPES:
                # Longer than Kafka is away; a lost lease of another one shows soon.
                lease_ms = 600_000 if type_name == "timed" else 20_000
                await client.register_type(type_name, first_stage="run", lease_ms=lease_ms)
            logs = Logs(deployment, client, connection, sizes)
            async with logs.worker() as worker:
                share = await logs.share_of_a_core(worker)
                live = await logs.latencies(sizes.live_lines, 0.1)
                screen = await logs.first_screen()
                burst = await logs.lines_per_s(worker)
                noisy = await logs.noisy_neighbour()
                storing = await logs.storing()
                away = await logs.kafka_away(Path(name))
            await connection.close()
    p50, p99 = percentile(live, 0.5), percentile(live, 0.99)
    tasks = {lines: median(one["tasks_per_s"] for one in found) for lines, found in rates.items()}
    cpu_ms = {lines: median(one["cpu_ms_per_task"] for one in found) for lines, found in rates.items()}
    ratio, kept = emit["task"] / emit["file"], tasks[3] / tasks[0]
    slower_us = away["p99 without (µs)"] - away["p99 with Kafka (µs)"]
    figures: dict[str, dict[str, Any]] = {
        "a call of log.info (µs)": {f"to {name}": emit[name] for name in ("file", "task", "nothing")},
        "a line, logged and shipped": {
            "shipping (µs)": emit["shipping"],
            "lines for each second of CPU": 1e6 / (emit["task"] + emit["shipping"]),
        },
        "one worker at full speed": burst,
        "a worker (% of a core)": share,
        "tasklogs": storing,
        "a live line": {"p50 (ms)": p50, "p99 (ms)": p99},
        "a screen": screen,
        "tasks/s of three stages": {f"{lines} lines a stage": rate for lines, rate in tasks.items()},
        "CPU of a task (ms)": {f"{lines} lines a stage": used for lines, used in cpu_ms.items()},
        f"Kafka away for {sizes.away_s:g} s": away,
        "beside a noisy task": noisy,
    }
    rate, screen_ms = burst["on Kafka, lines/s"], screen["first lines, stored (ms)"]
    others_ms, lost = noisy["others' most (ms)"], noisy["leases lost"]
    return report(
        "logs",
        {
            f"{row}: {name}": {"found": round(value, 2)}
            for row, values in figures.items()
            for name, value in values.items()
        },
        {
            "emit takes at most 1.5 times a FileHandler": (f"{ratio:.2f}", ratio <= 1.5),
            "50,000 lines/s of one worker": (f"{rate:,}", rate >= 50_000),
            "1,000 lines/s take at most 5 % of a core": (
                f"{share['difference']:.1f} %",
                share["difference"] <= 5,
            ),
            "tasklogs stores 20 MB/s a core": (
                f"{storing['MB/s a core']:.1f}",
                storing["MB/s a core"] >= 20,
            ),
            "a live line comes within 300 ms, p50": (f"{p50:.0f} ms", p50 <= 300),
            "a live line comes within 1 s, p99": (f"{p99:.0f} ms", p99 <= 1_000),
            "the first screen of 10 MiB takes 300 ms": (f"{screen_ms:.0f} ms", screen_ms <= 300),
            "three lines a stage cost at most 10 % of the tasks/s": (
                f"{100 - 100 * kept:.1f} %",
                kept >= 0.9,
            ),
            "without Kafka a handler's p99 grows by at most 1 ms": (
                f"{slower_us:.0f} µs",
                slower_us <= 1_000,
            ),
            "beside a task that logs 100 MB/s others' lines come within 2 s": (
                f"{others_ms:.0f} ms beside {noisy['logged by one (MB/s)']:.0f} MB/s",
                others_ms <= 2_000,
            ),
            "a noisy task costs no lease": (f"{lost}", lost == 0),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="fewer lines, rounds and seconds")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(SHORT if arguments.short else Sizes())))
