"""A worker goes on with the next stage of a task: when, and what becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import INLINE_LIMIT_BYTES, ContentType, Context, ObjectRef
from penstock.contracts.going_on import HEADER, decode_going_on, headers_of_going_on
from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId, count_of
from penstock.core.completion import Fence, Outcome
from penstock.core.early_start import EARLY_START
from penstock.core.going_on import follow_number, is_follow
from penstock.core.task import Priority
from penstock.worker import Done, Task
from penstock.worker.attempts import Attempts
from penstock.worker.execution import Stage
from penstock.worker.going_on import go_on
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.result_sender import ResultSender

FENCE = Fence(7, 2, "one", 1)


async def handler(_task: Task) -> Done:
    return Done()


STAGES = {
    ("t", "one"): Stage(handler, 60.0, None),
    ("t", "two"): Stage(handler, 60.0, None),
    ("t", "limited"): Stage(handler, 60.0, None, concurrency=2),
}


def ready(**fields: Any) -> ReadyTask:
    given = {"priority": Priority.HIGH, "traceparent": "00-1-2-01", "goes_on_until_s": 10.0, **fields}
    return ReadyTask(FENCE, "t", Context.encode({"n": 1}), 30_000, **given)


def result(**fields: Any) -> StageResult:
    given = {"outcome": Outcome.NEXT, "next_stage": "two", "context": Context.encode({"n": 2}), **fields}
    return StageResult(fence=FENCE, **given)


def test_the_next_attempt_follows_its_result() -> None:
    """W4: it is the first of the next step, with the result's context, under the same terms."""
    ended = result()
    go_on(ready(), ended, STAGES, 9.9)
    follows = ended.follows
    assert follows is not None
    assert ended.goes_on is not None
    assert is_follow(ended.goes_on)
    assert count_of(ended.goes_on) == 0
    assert follow_number(0.9999999999) < 2**31
    assert follows.fence == Fence(7, 3, "two", ended.goes_on)
    assert follows.context == Context.encode({"n": 2})
    assert (follows.type, follows.lease_ms, follows.priority) == ("t", 30_000, Priority.HIGH)
    assert (follows.traceparent, follows.goes_on_until_s, follows.tries) == ("00-1-2-01", 10.0, 0)


def test_a_kept_context_is_that_of_the_attempt_before() -> None:
    """W4: `Next("two")` without a context keeps it."""
    ended = result(context=None)
    go_on(ready(), ended, STAGES, 9.9)
    assert ended.follows is not None
    assert ended.follows.context == Context.encode({"n": 1})


@pytest.mark.parametrize(
    ("fields", "now_s"),
    [
        ({}, 10.0),
        ({"next_stage": "three"}, 9.0),
        ({"next_stage": "limited"}, 9.0),
        ({"delay_ms": 1}, 9.0),
        ({"outcome": Outcome.DONE, "next_stage": None}, 9.0),
        ({"outcome": Outcome.SPAWN}, 9.0),
        ({"context": Context.encode("x" * INLINE_LIMIT_BYTES)}, 9.0),
        ({"context": Context(ContentType.JSON, ref=ObjectRef("contexts/a", "0" * 64, 9))}, 9.0),
    ],
    ids=["late", "no handler", "limited", "delay", "done", "spawn", "large", "reference"],
)
def test_no_attempt_follows_other_results(fields: dict[str, Any], now_s: float) -> None:
    """S3, S4: a worker goes on for a second, at once, with contexts that it has."""
    ended = result(**fields)
    go_on(ready(), ended, STAGES, now_s)
    assert (ended.goes_on, ended.follows) == (None, None)


def test_the_header_names_the_results_that_go_on() -> None:
    """A result record says which of its tasks go on, and nothing when none does."""
    going, other = result(), StageResult(fence=Fence(8, 0, "one", 0), outcome=Outcome.DONE)
    go_on(ready(), going, STAGES, 9.0)
    [(name, value)] = headers_of_going_on([going, other])
    assert name == HEADER
    assert decode_going_on(value) == {(7, 2): going.goes_on}
    assert headers_of_going_on([other]) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{",
        b"[1]",
        b"[[1]]",
        b'{"a":1}',
        b"[[1,2,0]]",
        b"[[1,2,2147483648]]",
        b"[[1,2,true]]",
        b"[[1,2]" + b" " * 500_000 + b"]",
    ],
)
def test_a_malformed_header_names_none(value: bytes | None) -> None:
    """O3: the tasks become ready, and nothing else changes."""
    assert decode_going_on(value) == {}


class Transport:
    """Stores results; a write waits until `may_end` is set."""

    def __init__(self) -> None:
        self.results: list[StageResult] = []
        self.may_end = asyncio.Event()

    async def send_results(self, results: Sequence[StageResult]) -> None:
        self.results += results
        await self.may_end.wait()

    async def send_heartbeat(self, _heartbeat: Heartbeat) -> None:
        pass


def sender(transport: Transport, started: list[ReadyTask]) -> ResultSender:
    def on_sent(_results: Sequence[StageResult]) -> list[AttemptId]:
        return []

    return ResultSender(transport, "w", on_sent, lambda attempt_ids: attempt_ids, started.extend)


async def test_an_attempt_begins_when_the_result_before_is_stored() -> None:
    """W1, W4: never earlier."""
    transport, started = Transport(), list[ReadyTask]()
    results = sender(transport, started)
    running = asyncio.create_task(results.run())
    ended = result()
    go_on(ready(goes_on_until_s=time.monotonic() + 60), ended, STAGES, time.monotonic())
    results.add(ended)
    await wait_until(lambda: transport.results)
    assert not started
    transport.may_end.set()
    await wait_until(lambda: started)
    assert started == [ended.follows]
    running.cancel()


@pytest.mark.parametrize("sending", [False, True])
async def test_a_worker_that_stops_goes_on_with_nothing(sending: bool) -> None:
    """W1: a result that is not on its way yet lets the task become ready. Behind one that is, the
    attempt is handed back."""
    transport, started = Transport(), list[ReadyTask]()
    results = sender(transport, started)
    running = asyncio.create_task(results.run())
    ended = result()
    go_on(ready(), ended, STAGES, 9.0)
    if not sending:
        results.begin_end()
    results.add(ended)
    await wait_until(lambda: transport.results)
    results.begin_end()
    transport.may_end.set()
    await results.wait_sent()
    assert not started
    outcomes = [(each.fence.step, each.outcome, each.goes_on is not None) for each in transport.results]
    expected = [(2, Outcome.NEXT, sending)]
    assert outcomes == ([*expected, (3, Outcome.HANDED_BACK, False)] if sending else expected)
    running.cancel()


class EncodingTransport(Transport):
    """Encodes results as a transport does, before it stores them."""

    async def send_results(self, results: Sequence[StageResult]) -> None:
        encode_results("w", results)
        await super().send_results(results)


async def test_no_attempt_follows_a_result_that_cannot_be_encoded() -> None:
    """W4: a failure takes its place, so the task does not enter the next stage."""
    transport, started = EncodingTransport(), list[ReadyTask]()
    transport.may_end.set()
    results = sender(transport, started)
    running = asyncio.create_task(results.run())
    ended = result(error=object())
    go_on(ready(), ended, STAGES, 9.0)
    assert ended.follows is not None
    results.add(ended)
    await results.wait_sent()
    assert [each.outcome for each in transport.results] == [Outcome.FAIL]
    assert not started
    running.cancel()


@pytest.mark.parametrize("revoked", [False, True])
async def test_nothing_follows_an_attempt_that_was_revoked_while_its_result_was_sent(revoked: bool) -> None:
    """H3: the revocation named the attempt that ran; the next one would run until its claim."""
    settings = SimpleNamespace(backlog=0)
    registered: Any = SimpleNamespace(limits={"t": {}}, settings=settings, early_start=EARLY_START, slots=4)
    handlers: Any = SimpleNamespace(waits=lambda _ids: set(), drop=lambda _ids: None)
    transport: Any = Transport()
    attempts = Attempts(registered, "w", transport, handlers, time.monotonic, HeldTokens())
    taken, ended = ready(), result()
    attempts.in_flight.add([taken])
    attempts.unclaimed.add([taken])
    go_on(taken, ended, STAGES, 9.9)
    if revoked:
        attempts.on_revoked(Revocation("cancelled", [taken.attempt_id]))
    attempts.on_sent([ended])
    assert (ended.follows is None) == revoked
    assert len(attempts.in_flight) == (0 if revoked else 1)
