"""Limits of a call to a hostile target: each call ends by its deadline and holds little memory.

The targets answer too slowly, too much, with invalid HTTP, or not at all.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import pytest
from tests.support.callback_targets import LOOPBACK, SECRET, keys_of, make_callback
from tests.support.waiting import wait_until

from penstock.callbacks.caller import EXCERPT_BYTES, EXCERPT_TIMEOUT_S, Caller, CallResult, open_caller
from penstock.callbacks.settings import CallbacksSettings

DEADLINE_S = 1.0
# Requirement: a slot is free again half a second after the deadline at the latest.
TOLERANCE_S = 0.5
MEGABYTE = 1024 * 1024
CHUNK = b"x" * 64 * 1024

OK = b"HTTP/1.1 200 OK\r\n"
GIGABYTE = OK + b"content-length: 1073741824\r\n\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class LoopLag:
    """Measures how long the test's own event loop was blocked.

    A busy machine blocks the loop; the tests add this time to their tolerance.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._due_s = math.inf

    async def measure(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._due_s = clock() + 0.01
            await asyncio.sleep(0.01)
            self._seconds += self._overdue_s()

    def _overdue_s(self) -> float:
        return max(0.0, asyncio.get_running_loop().time() - self._due_s - 0.005)

    @property
    def tolerance_s(self) -> float:
        # `measure` has not added a block that ended just now.
        return TOLERANCE_S + self._seconds + self._overdue_s()


@pytest.fixture
async def loop_lag() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    measuring = asyncio.create_task(lag.measure())
    yield lag
    measuring.cancel()


Send = Callable[[bytes], Awaitable[None]]
Script = Callable[[Send], Awaitable[None]]


@dataclass
class HostileTarget:
    """A target that runs a script from a request's first byte until the connection is closed."""

    script: Script | None = None
    reads: bool = True
    port: int = 0
    started: int = 0
    ended: int = 0
    sent_bytes: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.started += 1

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()
            self.sent_bytes += len(data)

        async def run_script() -> None:
            if self.script is not None:
                await self.script(send)
            await asyncio.Event().wait()

        script_task = asyncio.create_task(run_script())
        with suppress(ConnectionError):
            await reader.read(1)
            if not self.reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's TCP transport has it
                with suppress(ConnectionError):
                    await script_task
            while await reader.read(65536):
                pass
        script_task.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await script_task
        writer.close()
        self.ended += 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def all_closed(self) -> bool:
        return self.started == self.ended > 0


@pytest.fixture
async def target() -> AsyncIterator[HostileTarget]:
    hostile = HostileTarget()
    async with await asyncio.start_server(hostile.handle, "127.0.0.1", 0) as server:
        hostile.port = server.sockets[0].getsockname()[1]
        yield hostile


@asynccontextmanager
async def running_caller(timeout_s: float = DEADLINE_S) -> AsyncIterator[Caller]:
    settings = CallbacksSettings.load(
        {}, callback_secrets=(SECRET,), callback_allow=LOOPBACK, callback_timeout_s=timeout_s
    )
    async with open_caller(settings, keys_of) as caller:
        yield caller


async def call(target: HostileTarget, url: str = "") -> CallResult:
    """Makes one call and asserts that it ends by the deadline and closes its connection."""
    lag = LoopLag()
    measuring = asyncio.create_task(lag.measure())
    async with running_caller() as caller:
        started_s = asyncio.get_running_loop().time()
        result = await caller.call(make_callback(url or target.url))
        assert asyncio.get_running_loop().time() - started_s < DEADLINE_S + lag.tolerance_s
        measuring.cancel()
        await wait_until(target.all_closed, what="the connection is closed")
    return result


@contextmanager
def memory_limit(megabytes: float) -> Iterator[None]:
    """Fails if the block holds more memory than this at any moment, caller and target together."""
    tracemalloc.start()
    try:
        yield
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < megabytes * MEGABYTE


def flooding(head: bytes, chunk: bytes = CHUNK) -> Script:
    """Sends `head`, then repeats `chunk` without end, as fast as the caller reads."""

    async def script(send: Send) -> None:
        await send(head)
        while True:
            await send(chunk)

    return script


def trickling(head: bytes, data: bytes) -> Script:
    """Sends `head`, then one byte of `data` every 0.1 s: too often for a timeout between bytes."""

    async def script(send: Send) -> None:
        await send(head)
        for byte in data * 1000:
            await send(bytes([byte]))
            await asyncio.sleep(0.1)

    return script


async def silence(_send: Send) -> None:
    """Reads the request and sends nothing."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(silence, id="nothing"),
        pytest.param(trickling(b"", b"HTTP/1.1 200 OK\r\n"), id="a status line by the byte"),
        pytest.param(trickling(OK, b"x-a: b\r\n"), id="headers by the byte"),
        pytest.param(trickling(b"", b"HTTP/1.1 102 x\r\n\r\n"), id="interim answers by the byte"),
    ],
)
async def test_a_call_without_a_status_ends_at_the_deadline(
    target: HostileTarget, script: Script, loop_lag: LoopLag
) -> None:
    """C7a: one deadline covers the whole call; single bytes do not extend it."""
    target.script = script
    with memory_limit(16):
        result = await call(target)
    assert result.kind == "Timeout"
    assert DEADLINE_S <= result.took_s < DEADLINE_S + loop_lag.tolerance_s


async def test_endless_interim_answers_end_at_the_deadline(target: HostileTarget, loop_lag: LoopLag) -> None:
    """C7a: interim answers are no answer, and reading them does not block the deadline."""
    target.script = flooding(b"", b"HTTP/1.1 102 x\r\n\r\n" * 100)
    async with running_caller() as caller:
        result = await caller.call(make_callback(target.url))
    assert result.kind == "Timeout"
    # Caller and target share this event loop, and both keep it busy.
    assert result.took_s < DEADLINE_S + 4 * loop_lag.tolerance_s


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param(flooding(b"", CHUNK), "Protocol", id="a status line"),
        # The status arrived before.
        pytest.param(flooding(OK + b"x-a: ", CHUNK), "HTTP", id="a header's value"),
        pytest.param(flooding(OK, CHUNK), "HTTP", id="a header's name"),
        pytest.param(flooding(OK, b"x-a: b\r\n" * 1000), "HTTP", id="headers"),
        pytest.param(flooding(CHUNKED + b"1;", CHUNK), "HTTP", id="a chunk's extension"),
    ],
)
async def test_an_endless_head_ends_the_call(target: HostileTarget, script: Script, kind: str) -> None:
    """C7a: the caller rejects a head of extreme length and neither keeps nor shows it."""
    target.script = script
    with memory_limit(16):
        result = await call(target)
    assert result.kind == kind
    assert len(repr(result)) < 2048


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(GIGABYTE, id="1 GB"),
        pytest.param(CHUNKED + b"10000000000\r\n", id="one chunk of a terabyte"),
        pytest.param(OK + b"\r\n", id="until it closes"),
        pytest.param(
            GIGABYTE.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"), id="a decompression bomb"
        ),
    ],
)
async def test_a_huge_body_is_not_read(target: HostileTarget, head: bytes) -> None:
    """C7a: fifty such calls hold less than 64 MB; each status counts, each connection is closed."""
    target.script = flooding(head)
    with memory_limit(64):
        # The deadline is long because callers and targets share one event loop; no call reaches it.
        async with running_caller(15.0) as caller:
            results = await asyncio.gather(
                *(caller.call(make_callback(target.url, number)) for number in range(50))
            )
            await wait_until(target.all_closed, what="the connections are closed")
    assert {result.status for result in results} == {200}
    assert {len(result.excerpt or "") for result in results} == {EXCERPT_BYTES}
    # Only the sockets' buffers hold the rest.
    assert target.sent_bytes < 50 * 16 * MEGABYTE


@pytest.mark.parametrize(
    "head", [GIGABYTE, CHUNKED, OK + b"\r\n"], ids=["1 GB", "chunked", "until it closes"]
)
async def test_reading_of_a_trickling_body_ends_early(
    target: HostileTarget, head: bytes, loop_lag: LoopLag
) -> None:
    """C7a: the status is the outcome, so the slot is free after the excerpt's timeout.

    An earlier deadline ends the reading just before it.
    """
    target.script = trickling(head, b"1\r\nx\r\n" if head is CHUNKED else b"x")
    result = await call(target)
    # A timeout would repeat a call that the target has answered.
    assert (result.kind, result.status) == ("HTTP", 200)
    assert result.took_s < min(DEADLINE_S, EXCERPT_TIMEOUT_S) + loop_lag.tolerance_s


async def test_a_timely_status_counts_after_a_pause_of_the_process(target: HostileTarget) -> None:
    """C7a: the process reads a timely status after the deadline and does not repeat the call."""
    target.script = trickling(GIGABYTE, b"x")

    async def block_loop() -> None:
        # The caller has read the status and waits for the body.
        await wait_until(lambda: target.sent_bytes > len(GIGABYTE) + 1)
        time.sleep(2 * DEADLINE_S)  # noqa: ASYNC251 (the injected fault)

    blocking = asyncio.create_task(block_loop())
    async with running_caller() as caller:
        result = await caller.call(make_callback(target.url))
    await blocking
    assert result.took_s > DEADLINE_S
    assert (result.kind, result.status) == ("HTTP", 200)


async def test_a_call_to_a_target_that_answers_and_never_reads_ends_at_the_deadline(
    target: HostileTarget, loop_lag: LoopLag
) -> None:
    """C7a: a call that is blocked while it sends frees its slot, too."""
    target.reads = False
    target.script = trickling(GIGABYTE, b"x")
    async with running_caller() as caller:
        started_s = asyncio.get_running_loop().time()
        large = replace(make_callback(target.url), body=b"x" * 64 * MEGABYTE)
        await caller.call(large)
        assert asyncio.get_running_loop().time() - started_s < DEADLINE_S + loop_lag.tolerance_s


async def test_a_call_without_a_tls_handshake_ends_at_the_deadline(
    target: HostileTarget, loop_lag: LoopLag
) -> None:
    """C7a: the deadline covers connecting and the TLS handshake."""
    result = await call(target, target.url.replace("http:", "https:"))
    assert result.kind == "Timeout"
    assert result.took_s < DEADLINE_S + loop_lag.tolerance_s


async def test_a_call_that_is_never_accepted_ends_at_the_deadline(loop_lag: LoopLag) -> None:
    """C7a: the deadline starts before connecting; the target's accept queue is full."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.settimeout(0)
            filler.connect_ex(full.getsockname())
        async with running_caller() as caller:
            result = await caller.call(make_callback(f"http://127.0.0.1:{full.getsockname()[1]}/hook"))
    assert result.kind == "Timeout"
    assert result.took_s < DEADLINE_S + loop_lag.tolerance_s
