"""A stream of a log that ends early is continued by another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from penstock.client import logs
from penstock.client.logs import LogMethods


class Streams(LogMethods):
    """The streams of a gateway, one after the other."""

    def __init__(self, *streams: list[bytes]) -> None:
        self.streams = [*streams]
        self.resumed: list[str | None] = []
        self.began_s: list[float] = []

    async def _request(self, *_words: Any, **_options: Any) -> Any:
        raise NotImplementedError

    async def _lines(
        self, path: str, query: Any = (), headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        assert path == "/tasks/1/logs/0/0"
        assert ("follow", "true") in query
        self.began_s.append(time.monotonic())
        self.resumed.append((headers or {}).get("Last-Event-ID"))
        for line in self.streams.pop(0):
            yield line


async def test_a_stream_that_ends_early_is_continued_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: from the line behind the last one, and not at once: the gateway may be stopping."""
    monkeypatch.setattr(logs, "RECONNECT_S", 0.05)
    behind = [b"event: behind", b'data: {"message": "reconnect to read on"}']
    client = Streams(
        [b"id: a:0", b"event: line", b'data: {"text": "x"}', b"", *behind],
        behind,
        [b"event: end", b'data: {"state": "ended"}'],
    )
    async with asyncio.timeout(10):
        found = [document async for document in client.follow_log(1, 0, 0)]
    assert found == [{"text": "x"}, {"state": "ended"}]
    assert client.resumed == [None, "a:0", "a:0"]
    assert client.began_s[2] - client.began_s[0] >= 0.1
