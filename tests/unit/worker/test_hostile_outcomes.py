"""The outcome of a handler is read alone: it is one result of its attempt, and of no other."""

import asyncio
import dataclasses
import enum
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker_platform import RecordingPlatform

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.core.completion import Fence, Outcome
from penstock.objects import ObjectStore
from penstock.worker import Done, Fail, Next, RetryAfter
from penstock.worker.contexts import ResultContexts
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.result_sender import MAX_BATCH_BYTES, ResultSender

FORGED = b'1},{"id":4711,"step":0,"stage":"s","attempt":0,"outcome":"done","context":"forged"'


class Unprintable:
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__
    __bool__ = __str__


class UnprintableError(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class OwnError(BaseException):
    pass


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Measured:
    mean: float


def generator():
    yield Done()


async def coroutine():
    """An async handler that returns it has not awaited it; its own result is no outcome."""


def endless():
    return endless()


def chained():
    error = ValueError("first")
    error.__cause__ = error
    return error


def recursive():
    value = []
    value.append(value)
    return value


# By name, because each test makes the values anew: some of them can be used once only.
RETURNED = {
    "forging context": lambda: Done(Context(ContentType.JSON, FORGED)),
    "forging next": lambda: Next("n", Context(ContentType.JSON, FORGED)),
    "forging fragment": lambda: Done(orjson.Fragment(FORGED)),
    "forging fragment within": lambda: Done({"a": orjson.Fragment(FORGED)}),
    "broken JSON": lambda: Done(Context(ContentType.JSON, b"{")),
    "no JSON": lambda: Done(Context(ContentType.JSON, b"")),
    "NaN": lambda: Done(Context(ContentType.JSON, b"NaN")),
    "lone surrogate": lambda: Done(Context(ContentType.JSON, b'"\\ud800"')),
    "long integer": lambda: Done(Context(ContentType.JSON, b"1" * 30)),
    "deep": lambda: Done(Context(ContentType.JSON, b"[" * 400 + b"]" * 400)),
    "text that is no UTF-8": lambda: Done(Context(ContentType.TEXT, b"\xff")),
    "text that is str": lambda: Done(Context(ContentType.TEXT, "text")),
    "no data": lambda: Done(Context(ContentType.JSON)),
    "no URL": lambda: Done(Context(ContentType.URL, b"nowhere")),
    "unknown content type": lambda: Done(Context("video", b"1")),
    "unhashable content type": lambda: Done(Context([], b"1")),
    "data that is a number": lambda: Done(Context(ContentType.BYTES, 5)),
    "foreign reference": lambda: Done(Context(ContentType.JSON, ref=ObjectRef("history/x", "0" * 64, 1))),
    "reference of another namespace": lambda: Done(
        Context(ContentType.JSON, ref=ObjectRef.of(b"x" * 5_000, "acme"))
    ),
    "no reference": lambda: Done(Context(ContentType.JSON, ref="contexts/x")),
    "size that is text": lambda: Done(
        Context(ContentType.JSON, ref=ObjectRef("contexts/00/" + "0" * 64, "0" * 64, "1"))
    ),
    "not finite": lambda: Done(Measured(float("nan"))),
    "recursive": lambda: Done(recursive()),
    "unprintable": Unprintable,
    "unprintable context": lambda: Done(Unprintable()),
    "unprintable reason": lambda: Fail(Unprintable()),
    "unprintable permanent": lambda: Fail("x", permanent=Unprintable()),
    "unprintable retry": lambda: RetryAfter(1, Unprintable()),
    "unprintable stage": lambda: Next(Unprintable()),
    "unprintable delay": lambda: Next("n", delay_s=Unprintable()),
    "generator": generator,
    "coroutine": coroutine,
    "class": lambda: Done,
    "nothing": lambda: None,
    "exception": lambda: ValueError("returned"),
    "bytes as stage": lambda: Next(b"n"),
    "nan delay": lambda: Next("n", delay_s=float("nan")),
    "infinite delay": lambda: RetryAfter(float("inf")),
    "negative delay": lambda: RetryAfter(-0.001),
    "huge delay": lambda: RetryAfter(10**400),
    "delay of another type": lambda: RetryAfter("1"),
}
# Exceptions that handlers raise, with a part of the message of the failure.
RAISED = {
    "usual": (lambda: LookupError("no such thing"), "no such thing"),
    "own": (lambda: OwnError("boo"), "boo"),
    "exit": (lambda: SystemExit(3), "3"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "generator exit": (GeneratorExit, "GeneratorExit"),
    "cancelled": (asyncio.CancelledError, "ancelled"),
    "unprintable": (UnprintableError, "cannot be printed: KeyboardInterrupt"),
    "unprintable argument": (lambda: ValueError(Unprintable()), "cannot be printed: SystemExit"),
    "NUL": (lambda: ValueError("a\0b"), "a\\x00b"),
    "surrogate": (lambda: OSError("no such file: \ud800.mp4"), "no such file: \\ud800.mp4"),
    "huge": (lambda: ValueError("\x01" * 10_000_000), "\x01"),
    "own cause": (chained, "first"),
    "group": (lambda: BaseExceptionGroup("many", [SystemExit(1), ValueError("x" * 100_000)]), "many"),
    "broken syntax error": (lambda: SyntaxError("x", ("f", "not a line", None, 5)), "x"),
}
READY = ReadyTask(Fence(7, 2, "s", 1), "t", Context.encode({"a": 1}), lease_ms=60_000)


async def run(handler, objects=None):
    def nobody_is_abandoned(result):
        raise AssertionError(result)

    execution = Execution({("t", "s"): Stage(handler, 30.0, None)}, objects or ObjectStore("memory:///"), 4)
    return await execution.run(READY, nobody_is_abandoned)


def valid(number):
    return StageResult(
        fence=Fence(number, 0, "s", 0), outcome=Outcome.DONE, context=Context.encode({"n": number})
    )


async def send(*results):
    """Returns the results that the platform reads when a worker sends them in one batch."""
    records = []

    class Transport:
        async def send_results(self, batch):
            records.append(encode_results("w", batch))

        async def send_heartbeat(self, _heartbeat):
            pass

    sender = ResultSender(Transport(), "w", lambda _results: [], lambda ids: ids)
    sending = asyncio.ensure_future(sender.run())
    for result in results:
        sender.add(result)
    await sender.wait_sent()
    sending.cancel()
    assert all(len(record) < 1_000_000 for record in records)
    read = [decode_results(record) for record in records]
    assert not any(faults for _worker, _results, faults in read)
    return [result for _worker, results, _faults in read for result in results]


def handlers(made, *, raised):
    def plain(_task):
        if raised:
            raise made()
        return made()

    async def coroutine_function(task):
        return plain(task)

    return plain, coroutine_function


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", RETURNED)
async def test_an_invalid_return_value_fails_its_attempt_alone(name, sync):
    """W1, W4: it is a permanent failure with a reason; results beside it are as they were."""
    plain, coroutine_function = handlers(RETURNED[name], raised=False)
    found = await run(plain if sync else coroutine_function)
    first, failure, last = await send(valid(1), found, valid(2))
    assert (first, last) == (valid(1), valid(2))
    assert (failure.fence, failure.outcome, failure.permanent) == (READY.fence, Outcome.FAIL, True)
    assert failure.error.message


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", RAISED)
async def test_an_exception_fails_its_attempt_alone(name, sync):
    """W1: also one that ends interpreters or loops, or that cannot be printed or written. The
    failure has kind, message and traceback, which the API shows."""
    made, words = RAISED[name]
    plain, coroutine_function = handlers(made, raised=True)
    found = await run(plain if sync else coroutine_function)
    first, failure, last = await send(valid(1), found, valid(2))
    assert (first, last) == (valid(1), valid(2))
    assert (failure.fence, failure.outcome, failure.permanent) == (READY.fence, Outcome.FAIL, False)
    assert failure.error.kind == type(made()).__name__
    assert words in failure.error.message
    # A traceback is cut at its beginning; that of the broken error cannot be printed.
    assert "in plain" in failure.error.traceback or name in ("huge", "group", "broken syntax error")


async def test_a_handler_that_never_returns_from_recursion_fails_alone():
    """W1: the interpreter's limit is an exception of the handler."""
    found = await run(lambda _task: endless())
    assert found.error.kind == "RecursionError"


@pytest.mark.parametrize("sync", [True, False])
async def test_unusual_values_of_correct_types_are_accepted(sync):
    """W1: an enumeration as stage and fragments of JSON are what they look like."""
    plain, coroutine_function = handlers(
        lambda: Next(Colour.RED, {"a": orjson.Fragment(b'{ "b" : [1e2] }')}, delay_s=True), raised=False
    )
    [result] = await send(await run(plain if sync else coroutine_function))
    assert (result.next_stage, result.delay_ms) == ("red", 1000)
    assert result.context.decode() == {"a": {"b": [100.0]}}


async def test_a_handler_that_cancels_its_own_task_settles_its_attempt():
    """W1: otherwise the worker would renew the lease of an attempt without a handler, without
    end."""
    reported = []
    ended = asyncio.Event()

    async def handler(_task):
        asyncio.current_task().cancel()
        await asyncio.Event().wait()

    def report(result):
        reported.append(result)
        ended.set()

    execution = Execution({("t", "s"): Stage(handler, 30.0, None)}, ObjectStore("memory:///"), 4)
    pool = HandlerPool(execution, RecordingPlatform(report), 2)
    pool.start_all([READY])
    await ended.wait()
    [result] = reported
    assert (result.fence, result.outcome, result.error.kind) == (READY.fence, Outcome.FAIL, "CancelledError")
    await pool.drain(0.0)


async def test_a_drain_ends_when_it_is_hurried():
    """W1: the attempts of running handlers are handed back at once, and not after the timeout."""
    reported = []
    running, hurry = asyncio.Event(), asyncio.Event()

    async def handler(_task):
        running.set()
        await asyncio.Event().wait()

    execution = Execution({("t", "s"): Stage(handler, 3600.0, None)}, ObjectStore("memory:///"), 4)
    pool = HandlerPool(execution, RecordingPlatform(reported.append), 2)
    pool.start_all([READY])
    await running.wait()
    draining = asyncio.ensure_future(pool.drain(3600.0, hurry))
    await asyncio.sleep(0)
    assert not draining.done()
    hurry.set()
    await draining
    [result] = reported
    assert (result.fence, result.outcome) == (READY.fence, Outcome.HANDED_BACK)


async def test_a_failed_attempt_is_logged(caplog):
    """O8: the log of a worker has the task, the stage and the error of each failed attempt."""
    caplog.set_level("INFO", "penstock.worker")
    ended = asyncio.Event()

    async def handler(_task):
        raise KeyError("text")

    execution = Execution({("t", "s"): Stage(handler, 30.0, None)}, ObjectStore("memory:///"), 4)
    pool = HandlerPool(execution, RecordingPlatform(lambda _result: ended.set()), 2)
    pool.start_all([READY])
    await ended.wait()
    [entry] = [vars(record) for record in caplog.records if vars(record).get("event") == "attempt_failed"]
    assert READY.fence.ids().items() <= entry.items()
    assert (entry["levelname"], entry["task_type"], entry["error"]) == ("INFO", "t", "KeyError: 'text'")
    await pool.drain(0.0)


async def test_a_context_that_grows_when_encoded_is_judged_by_what_is_sent():
    """T4: 400 times `1e9,` are 1,601 bytes and 5,201 after encoding, so the worker stores them as
    an object."""
    text = b"[" + b",".join([b"1e9"] * 400) + b"]"
    contexts = ResultContexts(ObjectStore("memory:///"), lambda _attempt_id: "t")
    for value in (Context(ContentType.JSON, text), orjson.Fragment(text)):
        ended = await run(lambda _task, value=value: Done(value))
        [result] = await send(await contexts.stored(ended))
        assert (result.outcome, result.context.ref.size) == (Outcome.DONE, 5_201)


@pytest.mark.parametrize(
    "text",
    ["\x01" * 20_000, "\U0001f600" * 20_000, '"' * 20_000, "x" * 20_000],
    ids=["control", "emoji", "quotes", "plain"],
)
async def test_batches_stay_below_the_limit_of_a_record(text):
    """W4: a broker refuses a larger record at each repetition, and with it the results of all
    attempts."""
    results = [
        StageResult(
            fence=Fence(number, 0, "s", 0),
            outcome=Outcome.FAIL,
            error=Failure(kind="E", message=text[:2_000], traceback=text),
        )
        for number in range(1, 40)
    ]
    contexts = [
        StageResult(
            fence=Fence(number, 0, "s", 0),
            outcome=Outcome.DONE,
            context=Context(ContentType.TEXT, text.encode()[:4_096]),
        )
        for number in range(100, 400)
    ]
    read = await send(*results, *contexts)
    assert len(read) == len(results) + len(contexts)
    assert MAX_BATCH_BYTES < 1_000_000


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(codec=None), max_size=10),
        st.binary(max_size=10),
        st.sampled_from([orjson.Fragment(FORGED), orjson.Fragment(b"1"), object]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)
OUTCOMES = st.one_of(
    st.builds(Done, VALUES),
    st.builds(Next, VALUES, VALUES, VALUES),
    st.builds(Next, st.text(st.characters(codec=None), max_size=210), VALUES, st.floats()),
    st.builds(Fail, VALUES, VALUES),
    st.builds(RetryAfter, VALUES, VALUES),
    st.builds(
        lambda content_type, data: Done(Context(content_type, data)),
        st.one_of(st.sampled_from(ContentType), VALUES),
        st.one_of(st.binary(max_size=40), VALUES),
    ),
    VALUES,
)


@given(OUTCOMES)
def test_any_return_value_is_one_result_of_its_attempt(returned):
    """W1, W4: for any value the batch has three results, each with the fence of its attempt."""

    async def check():
        async def handler(_task):
            return returned

        return await send(valid(1), await run(handler), valid(2))

    first, between, last = asyncio.run(check())
    assert (first, last) == (valid(1), valid(2))
    assert between.fence == READY.fence
    assert sys.getrecursionlimit() >= 1_000
