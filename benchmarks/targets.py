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

CHUNK = b"x" * 65_536


# Addresses on which the targets listen, from 127.0.0.1 on.
HOSTS = 100


@dataclass(frozen=True)
class Behaviour:
    """How calls are answered.

    Attributes:
        kind: `answer`, `hang` (no answer), `drip` (one byte per second) or `huge` (a body of `size`
            bytes).
        after_s: seconds until the answer.
        status: HTTP status of the answer.
        headers: headers of the answer, as `Name: value` lines.
        slow_every: every n-th call is answered after `slow_s` seconds; 0 turns this off.
        slow_s: seconds until a slow answer.
        turns_s: seconds of alternating phases with `after_s` and `slow_s`; 0 turns this off.
        size: size of a huge body in bytes.
    """

    kind: str = "answer"
    after_s: float = 0.0
    status: int = 200
    headers: tuple[str, ...] = ()
    slow_every: int = 0
    slow_s: float = 0.0
    turns_s: float = 0.0
    size: int = 1 << 30


@dataclass
class CallLog:
    """Received calls: (path, webhook-id, arrival), and the end of aborted ones."""

    calls: list[tuple[str, str, float]] = field(default_factory=list)
    broken: list[tuple[str, str, float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)

    def behaviour_of(self, path: str, group: str) -> Behaviour:
        return self.behaviours.get(path) or self.behaviours.get(group) or Behaviour()

    def command(self, path: str, body: bytes) -> Any:
        if path == "/_/behaviour":
            for name, settings in orjson.loads(body).items():
                self.behaviours[name] = Behaviour(**settings)
            return {}
        answer = {"calls": self.calls, "broken": self.broken, "in_flight": self.in_flight}
        self.calls, self.broken = [], []
        return answer


class Connection(asyncio.Protocol):
    """One connection, which serves its calls in sequence."""

    def __init__(self, call_log: CallLog, loop: asyncio.AbstractEventLoop) -> None:
        self._call_log = call_log
        self._loop = loop
        self._buffer = b""
        self._call: tuple[str, str, float] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's)
        self._writable.set()
        if self._writing is not None:
            self._writing.cancel()
        if self._call is not None:
            self._call_log.broken.append((*self._call, time.monotonic()))
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
            call_log.counts[group] += 1
            after_s = behaviour.after_s
            if (behaviour.slow_every and call_log.counts[group] % behaviour.slow_every == 0) or (
                behaviour.turns_s and int(time.monotonic() / behaviour.turns_s) % 2
            ):
                after_s = behaviour.slow_s
            if after_s:
                self._loop.call_later(after_s, self._answer, behaviour)
            else:
                self._answer(behaviour)
        elif behaviour.kind != "hang":
            self._writing = self._loop.create_task(self._write(behaviour))

    def _answer(self, behaviour: Behaviour) -> None:
        if self._call is not None:
            self._end()
            self._send(behaviour.status, b"", *behaviour.headers)

    async def _write(self, behaviour: Behaviour) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % behaviour.size)
        left = behaviour.size
        # A closing transport accepts writes without blocking; `connection_lost` then ends the call.
        while left > 0 and not self._transport.is_closing():
            if behaviour.kind == "drip":
                await asyncio.sleep(1.0)
                self._transport.write(b"x")
                left -= 1
            else:
                await self._writable.wait()
                self._transport.write(CHUNK)
                left -= len(CHUNK)
        if left <= 0 and self._call is not None:
            self._end()

    def _end(self) -> None:
        assert self._call is not None
        self._call_log.in_flight[self._call[0].split("/", 2)[1]] -= 1
        self._call = None

    def _send(self, status: int, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Configured", f"Content-Length: {len(body)}", *headers, "", ""]
        self._transport.write("\r\n".join(lines).encode() + body)


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
