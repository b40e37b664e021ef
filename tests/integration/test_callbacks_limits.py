"""What a hostile answer can cost: a call ends by its deadline and holds little memory, whatever comes or does not come."""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import pytest
from tests.callback_targets import LOOPBACK, SECRET, owed
from tests.waiting import wait_until

from penstock.callbacks.calling import EXCERPT_BYTES, EXCERPT_PATIENCE_S, Caller, Met, open_caller
from penstock.callbacks.settings import CallbacksSettings

DEADLINE_S = 1.0
# The issue's own: a slot is free again at the deadline and half a second.
TOLERANCE_S = 0.5
MEGABYTE = 1024 * 1024
CHUNK = b"x" * 64 * 1024

OK = b"HTTP/1.1 200 OK\r\n"
GIGABYTE = OK + b"content-length: 1073741824\r\n\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Noise:
    """How long the test's own loop stood still: what the machine did, and not the caller."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def listen(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + 0.01
            await asyncio.sleep(0.01)
            self.seconds += max(0.0, clock() - due_s - 0.005)

    @property
    def tolerance_s(self) -> float:
        return TOLERANCE_S + self.seconds


@pytest.fixture
async def noise() -> AsyncIterator[Noise]:
    heard = Noise()
    listening = asyncio.create_task(heard.listen())
    yield heard
    listening.cancel()


Say = Callable[[bytes], Awaitable[None]]
Script = Callable[[Say], Awaitable[None]]


@dataclass
class Hostile:
    """A target that follows a script from the first byte of a request until its connection is closed."""

    script: Script | None = None
    reads: bool = True
    port: int = 0
    begun: int = 0
    ended: int = 0
    sent: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1

        async def say(what: bytes) -> None:
            writer.write(what)
            await writer.drain()
            self.sent += len(what)

        async def follow() -> None:
            if self.script is not None:
                await self.script(say)
            await asyncio.Event().wait()

        following = asyncio.create_task(follow())
        with suppress(ConnectionError):
            await reader.read(1)
            if not self.reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]  # what asyncio gives for TCP has it
                with suppress(ConnectionError):
                    await following
            while await reader.read(65536):
                pass
        following.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await following
        writer.close()
        self.ended += 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def all_closed(self) -> bool:
        return self.begun == self.ended > 0


@pytest.fixture
async def target() -> AsyncIterator[Hostile]:
    hostile = Hostile()
    async with await asyncio.start_server(hostile.handle, "127.0.0.1", 0) as server:
        hostile.port = server.sockets[0].getsockname()[1]
        yield hostile


@asynccontextmanager
async def calling(timeout_s: float = DEADLINE_S) -> AsyncIterator[Caller]:
    settings = CallbacksSettings.load(
        {}, callback_secrets=(SECRET,), callback_allow=LOOPBACK, callback_timeout_s=timeout_s
    )
    async with open_caller(settings) as caller:
        yield caller


async def called(target: Hostile, url: str = "") -> Met:
    """One call, over when its connection is closed, too; within the deadline, whatever comes."""
    heard = Noise()
    listening = asyncio.create_task(heard.listen())
    async with calling() as caller:
        begun_s = asyncio.get_running_loop().time()
        met = await caller.call(owed(url or target.url))
        assert asyncio.get_running_loop().time() - begun_s < DEADLINE_S + heard.tolerance_s
        listening.cancel()
        await wait_until(target.all_closed, timeout=5, what="the connection is closed")
    return met


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    """Of memory at any moment of the block, this end of the wire and the other together."""
    tracemalloc.start()
    try:
        yield
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < megabytes * MEGABYTE


def pouring(head: bytes, what: bytes = CHUNK) -> Script:
    """Says `head`, then `what` for ever, as fast as it is taken."""

    async def script(say: Say) -> None:
        await say(head)
        while True:
            await say(what)

    return script


def dripping(head: bytes, what: bytes) -> Script:
    """Says `head`, then a byte of `what` a tenth of a second: sooner than a timeout between bytes would notice."""

    async def script(say: Say) -> None:
        await say(head)
        for byte in what * 1000:
            await say(bytes([byte]))
            await asyncio.sleep(0.1)

    return script


async def silence(_say: Say) -> None:
    """Takes the request and says nothing."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(silence, id="nothing"),
        pytest.param(dripping(b"", b"HTTP/1.1 200 OK\r\n"), id="a status line by the byte"),
        pytest.param(dripping(OK, b"x-a: b\r\n"), id="headers by the byte"),
        pytest.param(dripping(b"", b"HTTP/1.1 102 x\r\n\r\n"), id="interim answers by the byte"),
    ],
)
async def test_what_never_says_its_status_is_given_up_at_the_deadline(
    target: Hostile, script: Script, noise: Noise
) -> None:
    """C7a: one deadline for all; a byte now and then does not put it off."""
    target.script = script
    with at_most(16):
        met = await called(target)
    assert met.kind == "Timeout"
    assert DEADLINE_S <= met.took_s < DEADLINE_S + noise.tolerance_s


async def test_interim_answers_without_end_are_given_up_at_the_deadline(
    target: Hostile, noise: Noise
) -> None:
    """C7a: none of them is an answer, and reading them does not keep the loop from looking at its clock."""
    target.script = pouring(b"", b"HTTP/1.1 102 x\r\n\r\n" * 100)
    async with calling() as caller:
        met = await caller.call(owed(target.url))
    assert met.kind == "Timeout"
    # Both ends are in this loop, and neither lets it rest.
    assert met.took_s < DEADLINE_S + 4 * noise.tolerance_s


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param(pouring(b"", CHUNK), "Protocol", id="a status line"),
        pytest.param(pouring(OK + b"x-a: ", CHUNK), "Protocol", id="a header's value"),
        pytest.param(pouring(OK, CHUNK), "Protocol", id="a header's name"),
        pytest.param(pouring(OK, b"x-a: b\r\n" * 1000), "Protocol", id="headers"),
        # The status has been said by then.
        pytest.param(pouring(CHUNKED + b"1;", CHUNK), "HTTP", id="a chunk's extension"),
    ],
)
async def test_a_head_without_end_ends_the_call(target: Hostile, script: Script, kind: str) -> None:
    """C7a: what is long beyond reason is no HTTP, and is neither kept nor shown."""
    target.script = script
    with at_most(16):
        met = await called(target)
    assert met.kind == kind
    assert len(repr(met)) < 2048


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(GIGABYTE, id="1 GB"),
        pytest.param(CHUNKED + b"10000000000\r\n", id="one chunk of a terabyte"),
        pytest.param(OK + b"\r\n", id="until it closes"),
        pytest.param(GIGABYTE.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"), id="a bomb"),
    ],
)
async def test_a_huge_body_is_not_read(target: Hostile, head: bytes) -> None:
    """C7a: fifty at once cost less than 64 MB together; the status counts, and the connections are closed."""
    target.script = pouring(head)
    with at_most(64):
        # Time enough for this end and the other in one loop; none waits for it.
        async with calling(10.0) as caller:
            met = await asyncio.gather(*(caller.call(owed(target.url, number)) for number in range(50)))
            await wait_until(target.all_closed, timeout=5, what="the connections are closed")
    assert {each.status for each in met} == {200}
    assert {len(each.excerpt or "") for each in met} == {EXCERPT_BYTES}
    # What the sockets' buffers take.
    assert target.sent < 50 * 16 * MEGABYTE


@pytest.mark.parametrize(
    "head", [GIGABYTE, CHUNKED, OK + b"\r\n"], ids=["1 GB", "chunked", "until it closes"]
)
async def test_a_dripping_body_is_left_early(target: Hostile, head: bytes, noise: Noise) -> None:
    """C7a: the status has decided, so the slot is free after the excerpt's patience, or just before the deadline."""
    target.script = dripping(head, b"1\r\nx\r\n" if head is CHUNKED else b"x")
    met = await called(target)
    # Never a timeout: it would be called again, having heard.
    assert (met.kind, met.status) == ("HTTP", 200)
    assert met.took_s < min(DEADLINE_S, EXCERPT_PATIENCE_S) + noise.tolerance_s


async def test_a_status_that_came_in_time_stands_although_we_stood_still(target: Hostile) -> None:
    """C7a: it is not called again for what this process did not look at until the deadline was over."""
    target.script = dripping(GIGABYTE, b"x")

    async def stand_still() -> None:
        # The status is read, and the rest of the answer is waited for.
        await wait_until(lambda: target.sent > len(GIGABYTE) + 1)
        time.sleep(2 * DEADLINE_S)  # noqa: ASYNC251 (the fault that is tried)

    standing = asyncio.create_task(stand_still())
    async with calling() as caller:
        met = await caller.call(owed(target.url))
    await standing
    assert met.took_s > DEADLINE_S
    assert (met.kind, met.status) == ("HTTP", 200)


async def test_a_target_that_answers_and_never_reads_is_left_at_the_deadline(
    target: Hostile, noise: Noise
) -> None:
    """C7a: what is stuck in sending does not keep the slot either."""
    target.reads = False
    target.script = dripping(GIGABYTE, b"x")
    async with calling() as caller:
        begun_s = asyncio.get_running_loop().time()
        large = replace(owed(target.url), body=b"x" * 64 * MEGABYTE)
        await caller.call(large)
        assert asyncio.get_running_loop().time() - begun_s < DEADLINE_S + noise.tolerance_s


async def test_tls_that_is_never_spoken_is_given_up_at_the_deadline(target: Hostile, noise: Noise) -> None:
    """C7a: connecting counts, shaking hands included."""
    met = await called(target, target.url.replace("http:", "https:"))
    assert met.kind == "Timeout"
    assert met.took_s < DEADLINE_S + noise.tolerance_s


async def test_a_connection_that_is_never_accepted_is_given_up_at_the_deadline(noise: Noise) -> None:
    """C7a: connecting counts from its beginning: here its queue is full."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.settimeout(0)
            filler.connect_ex(full.getsockname())
        async with calling() as caller:
            met = await caller.call(owed(f"http://127.0.0.1:{full.getsockname()[1]}/hook"))
    assert met.kind == "Timeout"
    assert met.took_s < DEADLINE_S + noise.tolerance_s
