"""A service with one processor that misbehaves as its order says.

    python processor_probe.py '{"log": …, "hold": ["150"]}'

It writes each record to the log as "partition offset value", and each assigned or revoked partition
as "+partition" or "-partition".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from penstock import process
from penstock.errors import Invalid, PostgresUnavailable
from penstock.kafka.processing.processor import Delivery, Processor, ProcessorSettings
from penstock.kafka.topology.topics import Topic

PROBE = Topic("probe", 4, 3_600_000, "Of the tests of the processor.")
PROBE_REJECTED = Topic("probe.rejected", 1, 3_600_000, "Of the tests of the processor.")
NAME = "prober"


class Probe:
    """Settles each record at once, except those with the values in its order.

    Args:
        order: log (a file), settings (of the processor), and lists of values: hold (never settled),
            fails, exits, invalid, blocks (the event loop), away (the first two calls find a server
            unavailable).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._calls = 0

    def _write(self, line: str) -> None:
        os.write(self._log, line.encode() + b"\n")

    def _to(self, what: str, value: str) -> bool:
        return value in self._order.get(what, ())

    async def take(self, delivery: Delivery) -> None:
        value = delivery.value.decode()
        self._write(f"{delivery.partition} {delivery.offset} {value}")
        if self._to("fails", value):
            raise RuntimeError(f"cannot digest {value}")
        if self._to("exits", value):
            sys.exit(0)
        if self._to("invalid", value):
            raise Invalid("not a number I like", pointer="/value")
        if self._to("blocks", value):
            time.sleep(600)  # noqa: ASYNC251 (that is the fault)
        if self._to("away", value) and self._calls < 2:
            self._calls += 1
            raise PostgresUnavailable("away for a moment")
        if not self._to("hold", value):
            delivery.settle()

    async def assigned(self, partitions: frozenset[tuple[str, int]]) -> None:
        for _topic, number in sorted(partitions):
            self._write(f"+{number}")

    async def revoked(self, partitions: frozenset[tuple[str, int]]) -> None:
        for _topic, number in sorted(partitions):
            self._write(f"-{number}")

    async def service(self, stopping: asyncio.Event, ready: process.Ready) -> None:
        processor = Processor(
            ProcessorSettings(**self._order["settings"]),
            NAME,
            {PROBE: self.take},
            on_assigned=self.assigned,
            on_revoked=self.revoked,
        )
        await processor.run(stopping, ready)


if __name__ == "__main__":
    sys.exit(process.run(NAME, Probe(json.loads(sys.argv[1])).service))
