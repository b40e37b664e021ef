"""Callback targets: one process, any number of paths, each with the manners it is told.

    python -m benchmarks.targets READY_FILE

It speaks as much HTTP as callbacks need and no more, because it shares the machine with what it measures. A path's first
word is its group: manners are set for a path or for a group (`POST /_/manners`), what came is collected by
`GET /_/calls`, both in JSON. Times are of this machine's monotonic clock, which all its processes share.
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


@dataclass(frozen=True)
class Manners:
    """How calls are answered.

    Attributes:
        kind: `answer`, `hang` (never), `drip` (a byte a second), `huge` (a body of `size` bytes).
        after_s: seconds until the answer.
        status: of the answer.
        headers: of the answer, as `Name: value` lines.
        slow_every: each so many-th call is answered after `slow_s` instead; 0 for none.
        slow_s: see there.
        turns_s: for so long as usual and for so long after `slow_s`, in turn; 0 for always as usual.
        size: of a huge body.
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
class Book:
    """What came: (path, webhook-id, arrival), and (path, webhook-id, arrival, end) of what was broken off."""

    calls: list[tuple[str, str, float]] = field(default_factory=list)
    broken: list[tuple[str, str, float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)
    manners: dict[str, Manners] = field(default_factory=dict)

    def manners_of(self, path: str, group: str) -> Manners:
        return self.manners.get(path) or self.manners.get(group) or Manners()

    def command(self, path: str, body: bytes) -> Any:
        if path == "/_/manners":
            for name, given in orjson.loads(body).items():
                self.manners[name] = Manners(**given)
            return {}
        told = {"calls": self.calls, "broken": self.broken, "under_way": self.under_way}
        self.calls, self.broken = [], []
        return told


class Connection(asyncio.Protocol):
    """One connection: calls one after the other."""

    def __init__(self, book: Book, loop: asyncio.AbstractEventLoop) -> None:
        self._book = book
        self._loop = loop
        self._buffer = b""
        self._call: tuple[str, str, float] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none of asyncio's classes.
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
            self._book.broken.append((*self._call, time.monotonic()))
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
            self._send(200, orjson.dumps(self._book.command(path, buffer[end + 4 : total])))
            return
        self._call = (path, _header(head, b"webhook-id").decode(), time.monotonic())
        self._book.calls.append(self._call)
        self._serve(path)

    def _serve(self, path: str) -> None:
        book = self._book
        group = path.split("/", 2)[1]
        book.under_way[group] += 1
        manners = book.manners_of(path, group)
        if manners.kind == "answer":
            book.counts[group] += 1
            after_s = manners.after_s
            if (manners.slow_every and book.counts[group] % manners.slow_every == 0) or (
                manners.turns_s and int(time.monotonic() / manners.turns_s) % 2
            ):
                after_s = manners.slow_s
            if after_s:
                self._loop.call_later(after_s, self._answer, manners)
            else:
                self._answer(manners)
        elif manners.kind != "hang":
            self._writing = self._loop.create_task(self._write(manners))

    def _answer(self, manners: Manners) -> None:
        if self._call is not None:
            self._end()
            self._send(manners.status, b"", *manners.headers)

    async def _write(self, manners: Manners) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % manners.size)
        left = manners.size
        # One that is being closed takes in everything at once; its end is `connection_lost`.
        while left > 0 and not self._transport.is_closing():
            if manners.kind == "drip":
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
        self._book.under_way[self._call[0].split("/", 2)[1]] -= 1
        self._call = None

    def _send(self, status: int, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} As told", f"Content-Length: {len(body)}", *headers, "", ""]
        self._transport.write("\r\n".join(lines).encode() + body)


def _header(head: bytes, name: bytes) -> bytes:
    _before, found, after = head.partition(b"\r\n" + name + b": ")
    return after.split(b"\r\n", 1)[0] if found else b""


async def serve(ready: Path) -> None:
    """Serves until killed; the ready file holds the URL."""
    loop = asyncio.get_running_loop()
    book = Book()
    server = await loop.create_server(lambda: Connection(book, loop), "127.0.0.1", 0, backlog=4096)
    part = ready.with_suffix(".part")
    part.write_text(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    part.rename(ready)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(Path(sys.argv[1])))
