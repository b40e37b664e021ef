"""Name lookups: none keeps another waiting, and none keeps the loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.waiting import in_time

from penstock.concurrency import event_loop
from penstock.concurrency.event_loop import MAX_LOOKUPS, Lookups, event_loop_factory

ADDRESS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))


class Resolver:
    """Answers only when `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[Any] = []

    def look_up(self, *query: Any) -> list[Any]:
        self.asked.append(query[0])
        self.may_answer.wait()
        return [ADDRESS]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(event_loop, "_lookups", Lookups(made.look_up))
    yield made
    made.may_answer.set()


def test_a_lookup_without_a_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: a process with too many threads looks the name up again later."""
    lookups = Lookups(lambda *_query: [ADDRESS])
    with monkeypatch.context() as patched:

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        found = lookups.start(("one.test", 80))
        assert found is not None
        with pytest.raises(OSError, match="no thread for a lookup"):
            found.result(0)
    again = lookups.start(("one.test", 80))
    assert again is not None
    assert again.result(5) == [ADDRESS]


def in_loop(work: Any) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(work())


def test_a_resolver_without_an_answer_keeps_no_loop(resolver: Resolver) -> None:
    """S11: callers leave a lookup after their own time limits, and the loop closes before the
    resolver has answered."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for host in ("one.test", "two.test", "three.test", "four.test", "five.test"):
            with pytest.raises(TimeoutError):
                await in_time(loop.create_connection(asyncio.Protocol, host, 80), 0.01)
        # Numeric addresses need no resolver.
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(
            asyncio.Protocol, "127.0.0.1", server.sockets[0].getsockname()[1]
        )
        transport.close()
        server.close()

    in_loop(work)
    assert not resolver.may_answer.is_set()


def test_lookups_of_one_name_share_a_thread(resolver: Resolver) -> None:
    """A caller that leaves takes the answer from no other; the next lookup asks again."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        first, second = (asyncio.ensure_future(loop.getaddrinfo("one.test", 80)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        resolver.may_answer.set()
        assert await second == [ADDRESS]
        assert resolver.asked == ["one.test"]
        await loop.getaddrinfo("one.test", 80)
        assert resolver.asked == ["one.test"] * 2

    in_loop(work)


def test_the_number_of_threads_is_limited(resolver: Resolver) -> None:
    """A handler with any number of names starts no more threads than the limit."""
    lookups = Lookups(resolver.look_up)
    started = [lookups.start((f"host-{number}", 80)) for number in range(MAX_LOOKUPS + 1)]
    assert all(each is not None for each in started[:-1])
    assert started[-1] is None
    resolver.may_answer.set()
    for each in started[:-1]:
        assert each is not None
        each.result(30)


def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has two addresses, and no server listens on the first one."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        addresses = [(*ADDRESS[:4], ("127.0.0.2", port)), (*ADDRESS[:4], ("127.0.0.1", port))]
        monkeypatch.setattr(event_loop, "_lookups", Lookups(lambda *_query: list(addresses)))
        transport, _ = await loop.create_connection(asyncio.Protocol, "two.test", port)
        assert transport.get_extra_info("peername")[0] == "127.0.0.1"
        transport.close()
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError, match=r"refused.*; .*refused"):
            await loop.create_connection(asyncio.Protocol, "two.test", port)
        addresses.pop()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(asyncio.Protocol, "two.test", port)

    in_loop(work)
