"""The requests that a target receives, and which of its answers count, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.callback_targets import LOOPBACK, SECRET, keys_of, make_callback

from penstock.callbacks.caller import Caller, open_caller
from penstock.callbacks.settings import CallbacksSettings

OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = b"content-length: 0\r\n\r\n"


@dataclass
class Target:
    """Answers the requests of a connection, which has a number from 1.

    Attributes:
        answer: by the numbers of connection and request; None closes the connection.
        requests: (connection, request line, header `Host`).
    """

    answer: Callable[[int, int], bytes | None] = lambda _connection, _request: OK + EMPTY
    port: int = 0
    connections: int = 0
    requests: list[tuple[int, str, str]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection, count = self.connections, 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
                await reader.readexactly(int(headers["content-length"]))
                host = next(line for line in head if line.lower().startswith("host:"))
                self.requests.append((connection, head[0], host.partition(" ")[2]))
                count += 1
                answer = self.answer(connection, count)
                if answer is None:
                    return
                writer.write(answer)
                if b"close" in answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    async with await asyncio.start_server(target.handle, "127.0.0.1", 0) as server:
        target.port = server.sockets[0].getsockname()[1]
        yield target


@asynccontextmanager
async def running_caller() -> AsyncIterator[Caller]:
    settings = CallbacksSettings.load({}, callback_secrets=(SECRET,), callback_allow=LOOPBACK)
    async with open_caller(settings, keys_of) as caller:
        yield caller


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        *(
            (same, same)
            for same in (
                *("/a%2Fb", "/a%40b", "/a%7Eb", "/a%3Ab", "/%41", "/a%2fb%c3%a9", "/a%zz%"),
                *("/a/../b", "/a/./b", "/..", "//a//", "/a;b=c,d!$&'()*+", '/a|b"<>{}^`\\[]'),
                *("/a?", "/a?x=%2F%20+&&=", "/a?b?c/../d"),
            )
        ),
        ("", "/"),
        ("?x=%7E", "/?x=%7E"),
        ("/a?#part", "/a?"),
        ("/é?ß", "/%C3%A9?%C3%9F"),
        # A submission with them is refused; they would end the request line.
        ("/a b\r\nx: y\x00", "/a%20b%0D%0Ax:%20y%00"),
    ],
)
async def test_path_and_query_are_sent_as_they_were_given(target: Target, given: str, sent: str) -> None:
    """C7: a target that compares or signs the raw URL gets the very bytes of the submission."""
    async with running_caller() as caller:
        result = await caller.call(make_callback(target.url + given))
    assert result.status == 200
    assert [line for _, line, _ in target.requests] == [f"POST {sent} HTTP/1.1"]


async def test_the_host_is_sent_as_it_was_given(target: Target) -> None:
    """C7: the header `Host` is the authority of the URL (RFC 9112, section 3.2)."""
    async with running_caller() as caller:
        await caller.call(make_callback(f"http://LocalHost:{target.port}/"))
        await caller.call(make_callback(f"http://us:pw@127.0.0.1:{target.port}/"))
    assert [host for _, _, host in target.requests] == [
        f"LocalHost:{target.port}",
        f"127.0.0.1:{target.port}",
    ]


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(OK + b"x-a: " + b"a" * 70_000 + b"\r\n" + EMPTY, id="a field of 70 kB"),
        pytest.param(OK + b"x-a: b\r\n" * 500 + EMPTY, id="500 fields"),
        pytest.param(b"HTTP/1.1 200 " + b"O" * 70_000 + b"\r\n" + EMPTY, id="a long reason"),
        pytest.param(OK + b"x-a: \x00\r\n" + EMPTY, id="a control character"),
        pytest.param(OK + b"no colon\r\n" + EMPTY, id="a field without a colon"),
        pytest.param(OK + b"content-length: many\r\n\r\n", id="a length that is no number"),
        pytest.param(OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab", id="two lengths"),
        pytest.param(CHUNKED + b"zz\r\n\r\n", id="a chunk without a length"),
        pytest.param(CHUNKED + b"0\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", id="a huge trailer"),
        pytest.param(OK + b"set-cookie: \xff[;=;\r\n" + EMPTY, id="a cookie that is none"),
        pytest.param(b"HTTP/2 200\r\n" + EMPTY, id="a version of HTTP that was not requested"),
    ],
)
async def test_the_status_counts_whatever_else_the_answer_has(target: Target, answer: bytes) -> None:
    """C7: only the status decides. A target that has answered 200 is not called again."""
    target.answer = lambda _connection, _request: answer
    async with running_caller() as caller:
        result = await caller.call(make_callback(target.url))
        assert (result.kind, result.status, len(target.requests)) == ("HTTP", 200, 1)
        # The rest of that answer is not taken for the next one.
        target.answer = lambda _connection, _request: b"HTTP/1.1 500 x\r\n" + EMPTY
        assert (await caller.call(make_callback(target.url))).status == 500


@pytest.mark.parametrize(
    "answer", [b"220 smtp\r\n\r\n", b"HTTP/1.1 2000 x\r\n\r\n", b"HTTP/1.1 103 x\r\nno colon\r\n\r\n"]
)
async def test_an_answer_without_a_final_status_is_a_failure(target: Target, answer: bytes) -> None:
    """C7: what is not HTTP confirms nothing."""
    target.answer = lambda _connection, _request: answer
    async with running_caller() as caller:
        result = await caller.call(make_callback(target.url))
    assert (result.kind, result.status) == ("Protocol", None)


async def test_a_reused_connection_that_ends_without_an_answer_is_replaced_at_once(target: Target) -> None:
    """C7: a target closed the connections while they were idle; the call needs one new connection.

    Others that were idle as long are not tried.
    """
    together = asyncio.Barrier(3)

    async def call_together() -> None:
        await together.wait()
        assert (await caller.call(make_callback(target.url))).status == 200

    target.answer = lambda _connection, request: OK + EMPTY if request == 1 else None
    async with running_caller() as caller:
        await asyncio.gather(*(call_together() for _ in range(3)))
        assert target.connections == 3
        result = await caller.call(make_callback(target.url))
        assert result.status == 200
        assert [connection for connection, _, _ in target.requests[3:]][1:] == [4]
        assert result.took_s < 1.0


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        pytest.param(lambda _connection, _request: None, 1, id="a new connection"),
        pytest.param(
            lambda connection, request: OK + EMPTY if (connection, request) == (1, 1) else None,
            3,
            id="a reused connection, then a new one",
        ),
        pytest.param(
            lambda _connection, request: OK + EMPTY if request == 1 else b"HTTP/1.1 200 close",
            2,
            id="a part of an answer",
        ),
    ],
)
async def test_other_lost_connections_are_failures(
    target: Target, answer: Callable[[int, int], bytes | None], requests: int
) -> None:
    """C7: a call is sent again only after a reused connection without a byte, and only once."""
    target.answer = answer
    async with running_caller() as caller:
        if requests > 1:
            assert (await caller.call(make_callback(target.url))).status == 200
        result = await caller.call(make_callback(target.url))
    assert (result.kind, len(target.requests)) == ("Connection", requests)
