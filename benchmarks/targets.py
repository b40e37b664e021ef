"""Callback targets: one process with any number of paths, each with a configurable behaviour.

    python -m benchmarks.targets READY_FILE

It implements only the HTTP that callbacks need, because it shares the machine with the measured
service. The first word of a path is its group. `POST /_/behaviour` sets the behaviour of a path or
group, and `GET /_/calls` returns the received calls, both in JSON. Times are from the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop

# Addresses on which the targets listen, from 127.0.0.1 on.
HOSTS = 100


@dataclass(frozen=True)
class Behaviour:
    """How calls are answered.

    Attributes:
        kind: `answer` or `hang` (no answer).
        after_s: seconds until the answer.
        status: HTTP status of the answer.
    """

    kind: str = "answer"
    after_s: float = 0.0
    status: int = 200


@dataclass
class CallLog:
    """Received calls: (path, webhook-id, arrival)."""

    calls: list[tuple[str, str, float]] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)

    def behaviour_of(self, path: str, group: str) -> Behaviour:
        return self.behaviours.get(path) or self.behaviours.get(group) or Behaviour()

    def command(self, path: str, body: bytes) -> Any:
        if path == "/_/behaviour":
            for name, settings in orjson.loads(body).items():
                self.behaviours[name] = Behaviour(**settings)
            return {}
        answer = {"calls": self.calls, "in_flight": self.in_flight}
        self.calls = []
        return answer


class Connection(asyncio.Protocol):
    """One connection, which serves its calls in sequence."""

    def __init__(self, call_log: CallLog, loop: asyncio.AbstractEventLoop) -> None:
        self._call_log = call_log
        self._loop = loop
        self._buffer = b""
        self._call: tuple[str, str, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's)
        if self._call is not None:
            self._end()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = buffer[:end].lower()
        length = _header(head, b"content-length")
        total = end + 4 + int(length or 0)
        if len(buffer) < total:
            return
        self._buffer = buffer[total:]
        path = head.split(b" ", 2)[1].decode()
        if path.startswith("/_/"):
            self._send(200, orjson.dumps(self._call_log.command(path, buffer[end + 4 : total])))
            return
        self._call = (path, _header(head, b"webhook-id").decode(), time.monotonic())
        self._call_log.calls.append(self._call)
        self._serve(path)

    def _serve(self, path: str) -> None:
        call_log = self._call_log
        group = path.split("/", 2)[1]
        call_log.in_flight[group] += 1
        behaviour = call_log.behaviour_of(path, group)
        if behaviour.kind == "answer":
            if behaviour.after_s:
                self._loop.call_later(behaviour.after_s, self._answer, behaviour)
            else:
                self._answer(behaviour)

    def _answer(self, behaviour: Behaviour) -> None:
        if self._call is not None:
            self._end()
            self._send(behaviour.status, b"")

    def _end(self) -> None:
        assert self._call is not None
        self._call_log.in_flight[self._call[0].split("/", 2)[1]] -= 1
        self._call = None

    def _send(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Configured\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def _header(head: bytes, name: bytes) -> bytes:
    _before, found, after = head.partition(b"\r\n" + name + b": ")
    return after.split(b"\r\n", 1)[0] if found else b""


async def serve(ready: Path) -> None:
    """Serves until killed; writes its URL to the ready file."""
    loop = asyncio.get_running_loop()
    call_log = CallLog()
    server = await loop.create_server(lambda: Connection(call_log, loop), "127.0.0.1", 0, backlog=4096)
    part = ready.with_suffix(".part")
    # As hosts that fail independently of each other.
    port = server.sockets[0].getsockname()[1]
    others = [f"127.0.0.{number}" for number in range(2, HOSTS + 1)]
    await loop.create_server(lambda: Connection(call_log, loop), others, port, backlog=128)
    part.write_text(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    part.rename(ready)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(Path(sys.argv[1])))
