"""Shipping of task logs: no line of one handler stops the lines of the others."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from tests.support.waiting import in_time

from penstock.contracts.inbound_logs import read_logs
from penstock.core.attempt import AttemptId
from penstock.core.log_chunk import Chunk
from penstock.core.redaction import Redactor
from penstock.errors import InvalidRecord
from penstock.gateway.log_reports import MAX_BODY_BYTES
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.log_shipper import HttpLogTransport, LogShipper


class Gateway:
    """Reads requests as a gateway does."""

    def __init__(self):
        self.lines = []

    async def post(self, _path, body, _headers=None):
        encoded = orjson.dumps(body)
        assert len(encoded) <= MAX_BODY_BYTES
        for chunk in read_logs(orjson.loads(encoded)):
            self.lines += [line[3] for line in chunk.lines]


def make_buffer():
    return LogBuffer("w-1", Redactor(), lambda _urgent: None)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("more than 64 bits", {"n": 2**70}),
        ("a lone surrogate", {"name": "\udc80"}),
        ("\udc80", {}),
    ],
)
async def test_what_json_lacks_is_shipped_over_http(text, fields):
    """L: it raised TypeError in the shipper, and ended the worker with all of its attempts."""
    buffer, gateway = make_buffer(), Gateway()
    buffer.begin(AttemptId(1, 0, 0)).add(20, "task", text, fields)
    await HttpLogTransport(gateway, "w-1").send(buffer.take(10**9))
    assert len(gateway.lines) == 1


@pytest.mark.parametrize(("text", "fields"), [("語" * 5_000, {}), ("x", {"y": "z" * 8_000})])
async def test_a_request_is_within_the_limit_of_a_gateway(text, fields):
    """L: lines of many bytes, and fields, are divided among requests."""
    buffer, gateway = make_buffer(), Gateway()
    run = buffer.begin(AttemptId(1, 0, 0))
    for _ in range(300):
        run.add(20, "task", text, fields)
    chunks = []
    while buffer:
        chunks += buffer.take(10**9)
    await HttpLogTransport(gateway, "w-1").send(chunks)
    assert len(gateway.lines) == 300


class Transport:
    """Refuses the lines of task 1."""

    def __init__(self):
        self.sent: list[Chunk] = []

    async def send(self, chunks):
        if any(chunk.run.task_id == 1 for chunk in chunks):
            raise InvalidRecord("a line breaks the contract")
        self.sent += chunks


async def test_lines_that_are_refused_for_good_stop_no_others(caplog):
    """L: they are a gap in their log; before, all later lines of the worker waited behind them."""
    transport = Transport()
    buffer = make_buffer()
    shipper = LogShipper(buffer)
    buffer.begin(AttemptId(1, 0, 0)).add(20, "task", "refused")
    running = asyncio.create_task(shipper.run(transport))
    await in_time(shipper.drain(10.0))
    buffer.begin(AttemptId(2, 0, 0)).add(20, "task", "sent")
    await in_time(shipper.drain(10.0))
    running.cancel()
    assert [chunk.run.task_id for chunk in transport.sent] == [2]
    assert [each.event for each in caplog.records] == ["task_logs_invalid"]
