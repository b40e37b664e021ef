"""Requests that no well-behaved client sends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import in_time


@dataclass
class RawAnswer:
    """An answer; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def raw_request(port: int, head: str, body: bytes = b"") -> RawAnswer:
    """Sends the lines of a head, and returns the first answer.

    Args:
        port: of a server at 127.0.0.1.
        head: without the empty line at its end.
        body: follows the head.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"\r\n\r\n" + body)
        return await in_time(read_answer(reader))
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> RawAnswer:
    """The next answer of a connection, which must declare its length."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return RawAnswer(int(lines[0].split()[1]), headers, body)
