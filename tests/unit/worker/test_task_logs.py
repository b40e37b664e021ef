"""Capture of task logs: what belongs to a handler's attempt, whatever way it is logged."""

import asyncio
import builtins
import io
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.contracts.context import Context
from penstock.contracts.inbound_logs import SCHEMA
from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.task_log import chunk_to_wire
from penstock.contracts.validation import conform
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.core.log_limits import PARTIAL_CHARS
from penstock.core.redaction import Redactor
from penstock.objects import ObjectStore
from penstock.worker import Done, Fail, current_task, in_current_task, log_buffer
from penstock.worker.capture import capturing
from penstock.worker.execution import Execution, Stage
from penstock.worker.log_buffer import BUFFER_BYTES, LogBuffer
from penstock.worker.results import TRACEBACK_LIMIT

log = logging.getLogger("app.media")


def make_buffer(wake=lambda _urgent: None, environment=None):
    return LogBuffer("w-1", Redactor(environment or {}), wake)


def ready(id_):
    return ReadyTask(Fence(id_, 0, "s", 0), "t", Context.encode({}), lease_ms=60_000, tries=0)


async def run(handler, *ids, buffer, timeout_s=5.0, report=lambda *_report: None):
    stages = {("t", "s"): Stage(handler, timeout_s, None)}
    execution = Execution(stages, ObjectStore("memory:///"), 4, buffer, report, redact=buffer.redactor.text)
    with capturing("on"):
        return await asyncio.gather(*(execution.run(ready(id_), lambda _result: None) for id_ in ids))


def taken(buffer):
    """By task: its lines as (level, source, text), and how its run ended."""
    lines, ends = {}, {}
    while buffer:
        for chunk in buffer.take(10**9):
            known = lines.setdefault(chunk.run.task_id, [])
            assert chunk.first == len(known)
            known += [tuple(line[1:4]) for line in chunk.lines]
            if chunk.end:
                ends[chunk.run.task_id] = chunk.end
    return lines, ends


@pytest.fixture(autouse=True)
def level():
    logging.getLogger("app").setLevel(logging.DEBUG)
    yield
    logging.getLogger("app").setLevel(logging.NOTSET)


async def test_everything_that_a_handler_logs_is_in_its_own_log(capsys):
    """L1: logging, print, standard error and `task.log` of two handlers at once are apart."""
    buffer, met = make_buffer(), asyncio.Barrier(2)

    async def handler(task):
        log.info("begins %s", task.id)
        await met.wait()
        print("printed", task.id)
        await met.wait()
        sys.stderr.write(f"error {task.id}\n")
        await asyncio.create_task(deep())
        task.log.warning("structured", frame=task.id)
        return Done()

    async def deep():
        await met.wait()
        log.debug("deep %s", current_task().id)

    log.info("outside")
    print("outside")
    await run(handler, 1, 2, buffer=buffer)
    log.info("outside")
    lines, ends = taken(buffer)
    for id_ in (1, 2):
        assert lines.pop(id_) == [
            (20, "app.media", f"begins {id_}"),
            (20, "stdout", f"printed {id_}"),
            (20, "stderr", f"error {id_}"),
            (10, "app.media", f"deep {id_}"),
            (30, "task", "structured"),
        ]
        assert ends[id_] == "done"
    assert lines == {}
    # The worker's own output has what was printed as well.
    assert "printed 1\n" in capsys.readouterr().out


async def test_threads_have_the_log_of_their_handler():
    """L1: a synchronous handler, `asyncio.to_thread`, and a thread that the handler starts."""
    buffer = make_buffer()

    def sync(task):
        log.info("on a thread")
        thread = threading.Thread(target=in_current_task(log.info), args=("on its own thread",))
        thread.start()
        thread.join()
        return Done()

    async def handler(task):
        await asyncio.to_thread(log.info, "to_thread")
        return Done()

    await run(sync, 1, buffer=buffer)
    await run(handler, 2, buffer=buffer)
    lines, _ends = taken(buffer)
    assert [text for _, _, text in lines[1]] == ["on a thread", "on its own thread"]
    assert [text for _, _, text in lines[2]] == ["to_thread"]


async def test_a_pool_of_threads_works_for_several_tasks_at_once():
    """L1: a line belongs to the task that gave the work to the pool, also on several threads at
    once. Threads that worked for another task before keep nothing of it. Without `in_current_task`
    a line is in no log."""
    buffer = make_buffer()
    met = threading.Barrier(4)

    def work(n):
        met.wait()
        log.info("work %s of %s", n, current_task().id)

    def handler(task):
        list(pool.map(in_current_task(work), range(2)))
        pool.submit(log.info, "lost").result()
        return Done()

    with ThreadPoolExecutor(4) as pool:
        await run(handler, 1, 2, buffer=buffer)
        await run(handler, 3, 4, buffer=buffer)
    lines, _ends = taken(buffer)
    for id_ in (1, 2, 3, 4):
        assert sorted(text for _, _, text in lines[id_]) == [f"work {n} of {id_}" for n in range(2)]


async def test_print_is_the_builtin_while_it_is_captured():
    """L1: `print` is not patched; code that replaces or inspects it sees Python's own."""
    before, buffer = builtins.print, make_buffer()

    async def handler(task):
        assert builtins.print is print is before
        print("captured")
        return Done()

    [result] = await run(handler, 1, buffer=buffer)
    assert result.outcome.value == "done"
    assert taken(buffer)[0][1] == [(20, "stdout", "captured")]


async def test_a_stream_handler_does_not_repeat_a_record():
    """A record that also goes to a handler on standard error is in the log once, also if it does
    not reach the root logger."""
    buffer = make_buffer()
    alone = logging.getLogger("alone")

    async def handler(task):
        on_stderr = logging.StreamHandler()
        for logger in (log, alone):
            logger.addHandler(on_stderr)
        alone.propagate = False
        try:
            log.info("twice")
            alone.warning("only on its handler")
        finally:
            for logger in (log, alone):
                logger.removeHandler(on_stderr)
            alone.propagate = True
        return Done()

    await run(handler, 1, buffer=buffer)
    assert taken(buffer)[0][1] == [(20, "app.media", "twice"), (30, "alone", "only on its handler")]


@pytest.mark.parametrize("sync", [False, True])
async def test_the_failure_is_the_last_line(sync):
    """L2: the log of a failed attempt ends with its traceback."""
    buffer = make_buffer()

    def fails(task):
        print("before")
        raise KeyError("missing thing")

    async def fails_async(task):
        fails(task)

    await run(fails if sync else fails_async, 1, buffer=buffer)
    lines, ends = taken(buffer)
    assert lines[1][0] == (20, "stdout", "before")
    assert lines[1][1] == (40, "penstock", "Traceback (most recent call last):")
    assert lines[1][-1] == (40, "penstock", "KeyError: 'missing thing'")
    assert ends == {1: "fail"}


async def test_the_reason_of_a_reported_failure_is_the_last_line():
    buffer = make_buffer()

    async def handler(task):
        return Fail("no such file")

    await run(handler, 1, buffer=buffer)
    assert taken(buffer) == ({1: [(40, "penstock", "Fail: no such file")]}, {1: "fail"})


async def test_a_run_without_lines_ships_nothing():
    buffer = make_buffer()

    async def handler(task):
        return Done()

    await run(handler, 1, buffer=buffer)
    assert not buffer
    assert buffer.take(1000) == []


async def test_lines_after_the_end_are_not_in_the_log():
    """A thread that was abandoned, or a task that outlives its handler, logs no further."""
    buffer, later = make_buffer(), asyncio.Event()
    tasks = []

    async def lasting():
        await later.wait()
        log.info("too late")
        print("too late")

    async def handler(task):
        log.info("in time")
        tasks.append(asyncio.create_task(lasting()))
        return Done()

    with capturing("on"):
        await run(handler, 1, buffer=buffer)
        later.set()
        await tasks[0]
    assert taken(buffer)[0] == {1: [(20, "app.media", "in time")]}


async def test_a_cancelled_attempt_ends_its_log():
    buffer, begun = make_buffer(), asyncio.Event()

    async def handler(task):
        log.info("begun")
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(run(handler, 1, buffer=buffer))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert taken(buffer)[1] == {1: "cancelled"}


class Hostile:
    def __init__(self, how):
        self.how = how

    def __str__(self):
        if self.how == "raises":
            raise ValueError("no text")
        log.error("logs while it is formatted")
        return "text"

    __repr__ = __str__


@pytest.mark.parametrize("how", ["raises", "logs"])
async def test_logging_never_fails_the_handler(how, monkeypatch):
    """`emit` never raises, and is guarded against re-entry."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    buffer = make_buffer()

    async def handler(task):
        log.info("value %s", Hostile(how))
        log.info("too many %s", 1, 2)  # noqa: PLE1205 (this is what must do no harm)
        task.log.info("field", value=Hostile(how), deep=[[Hostile(how)]])
        task.log.info("\ud800 lone", **{"\udc00": "\udc00"})
        log.info("last")
        return Done()

    [result] = await run(handler, 1, buffer=buffer)
    assert result.outcome.value == "done"
    lines = taken(buffer)[0][1]
    assert lines[-1] == (20, "app.media", "last")
    # A value that cannot be printed costs the fields, and not the line.
    assert (20, "task", "field") in lines


async def test_a_handlers_line_with_the_fields_of_a_mark_ends_no_worker():
    """L: the shipper takes the lines of all runs; none of them may make it fail."""
    buffer = make_buffer()

    async def handler(task):
        logging.getLogger("penstock").warning("x", extra={"dropped_lines": 1})
        log.handle(logging.makeLogRecord({"name": "app", "levelno": 20, "msg": "y", "created": 1e300}))
        log.handle(logging.makeLogRecord({"name": "app", "levelno": 20, "msg": "z", "created": -1}))
        return Done()

    await run(handler, 1, buffer=buffer)
    [chunk] = buffer.take(10**9)
    assert [line[3] for line in chunk.lines] == ["x", "y", "z"]
    conform({"worker": "w", "chunks": [chunk_to_wire(chunk)]}, SCHEMA)
    assert not buffer.dropped


async def test_text_without_a_line_feed_has_a_bound():
    """L: while Kafka is away nothing is shipped, and 16 MiB wait at most."""
    buffer = make_buffer()
    run_log = buffer.begin(AttemptId(1, 0, 0))
    for _ in range(2_000):
        run_log.write("stdout", "x" * 1_000)
    assert sum(map(len, run_log.partials.values())) <= PARTIAL_CHARS
    run_log.end("done")
    [(*_, text)] = buffer.take(10**9)[0].lines
    assert "more bytes are not kept" in text


async def test_partial_lines_and_progress_bars():
    """Text without a line feed is shipped with the next flush; of what a carriage return
    overwrites, the last state is kept."""
    buffer = make_buffer()
    shipped = []

    async def handler(task):
        print("work", end="")
        shipped.extend(text for chunk in buffer.take(10**9) for *_, text in chunk.lines)
        print("ing\ndone")
        for n in range(100):
            print(f"\r{n} %", end="")
        return Done()

    await run(handler, 1, buffer=buffer)
    shipped += [line[3] for chunk in buffer.take(10**9) for line in chunk.lines]
    assert shipped == ["work", "ing", "done", "99 %"]


async def test_progress_is_in_the_log():
    """L1: a report of `task.progress` is a line of the task's log, with its fraction as a field."""
    buffer, shipped = make_buffer(), []

    async def handler(task):
        print("before")
        task.progress(0.4, "frame 1,200 of 3,000")
        print("after")
        shipped.extend(line for chunk in buffer.take(10**9) for line in chunk.lines)
        return Done()

    await run(handler, 1, buffer=buffer)
    assert [tuple(line[1:]) for line in shipped] == [
        (20, "stdout", "before"),
        (20, "progress", "40 %, frame 1,200 of 3,000", {"fraction": 0.4}),
        (20, "stdout", "after"),
    ]


async def test_of_many_reports_of_progress_one_a_second_is_in_the_log(monkeypatch):
    """H5: a handler may report each of its items; the last report before the end is kept."""
    buffer, now_s = make_buffer(), [1_000.0]
    monkeypatch.setattr(log_buffer.time, "monotonic", lambda: now_s[0])

    def texts():
        return [line[3] for chunk in buffer.take(10**9) for line in chunk.lines]

    run_log = buffer.begin(AttemptId(1, 0, 0))
    for n in range(101):
        run_log.add_progress(Progress(n / 100))
        now_s[0] += 0.03
    assert texts() == ["0 %", "34 %", "68 %"], "the reports at 0.00 s, 1.02 s and 2.04 s"
    assert texts() == [], "the last one is not due"
    assert buffer, "and waits"
    now_s[0] += 1.0
    assert texts() == ["100 %"]
    assert not buffer
    run_log.add_progress(Progress(None, "storing"))
    run_log.add_progress(Progress(None, "stored"))
    run_log.end("done")
    [chunk] = buffer.take(10**9)
    assert ([line[3] for line in chunk.lines], chunk.end) == (["stored"], "done")
    run_log.add_progress(Progress(None, "too late"))
    assert not buffer


async def test_a_failure_is_the_last_line_after_progress_and_partial_lines():
    """L2: the last report of progress, and text without a line feed, stand before the failure."""
    buffer = make_buffer()

    async def handler(task):
        for n in range(3):
            task.progress(n / 3)
        print("without a line feed", end="")
        raise ValueError("of the third item")

    await run(handler, 1, buffer=buffer)
    lines = [line for chunk in buffer.take(10**9) for line in chunk.lines]
    assert [line[4] for line in lines if line[2] == "progress"] == [{"fraction": 0.0}, {"fraction": 0.6667}]
    assert [line[3] for line in lines[:3]] == ["0 %", "66 %", "without a line feed"]
    assert lines[-1][3] == "ValueError: of the third item"


async def test_no_secret_is_in_reports_and_errors():
    """L: what the platform shows of an attempt beside its log is redacted before it is cut."""
    secret = "planted-9f8e7d"
    buffer, reports = make_buffer(environment={"SERVICE_TOKEN": secret}), []

    async def handler(task):
        task.progress(0.5, f"{'x' * 193} {secret}")
        raise ValueError(f"refused: {secret}{'x' * (1_996 - 22)}{secret}{'y' * 19_992}{secret}")

    [result] = await run(handler, 1, buffer=buffer, report=lambda _id, report: reports.append(report))
    assert [report.fraction for report in reports] == [0.5]
    assert result.error.message == f"refused: [redacted]{'x' * 1_974}[redact"
    assert result.error.traceback.endswith("y[redacted]\n")
    assert len(result.error.traceback) == TRACEBACK_LIMIT
    # A limit leaves no part of a secret either.
    assert not [part for part in ("plant", "7d") if part in repr((reports, result))]


@pytest.mark.parametrize(
    "path", ["logging", "print", "field", "exception", "long", "partial", "overflow", "progress"]
)
async def test_a_planted_secret_is_on_no_path(path):
    """L: a value of the environment is absent from everything that is shipped."""
    secret = "planted-9f8e7d"
    buffer = make_buffer(environment={"SERVICE_TOKEN": secret})

    async def handler(task):
        match path:
            case "logging":
                log.info("with %s", secret, extra={"value": secret})
            case "print":
                print("a", secret, "b", file=sys.stderr)
            case "field":
                task.log.info("x", inner={"list": [secret]}, **{secret: 1})
            case "exception":
                raise ValueError(secret)
            case "long":
                print("x" * 16_370 + secret + "y" * 16_380 + "\n" + secret)
            case "progress":
                task.progress(0.5, f"{secret} {'x' * 180} {secret}")
            case "partial":
                print(secret[:7], end="")
                print(secret[7:], end="")
            case "overflow":
                print("x" * (PARTIAL_CHARS - 6) + secret[:7], end="")
                print(secret[7:], end="")
        return Done()

    await run(handler, 1, buffer=buffer)
    chunks = buffer.take(10**9)
    assert chunks
    assert not [part for part in (secret[:-2], secret[7:]) if part in repr(chunks)]


async def test_a_noisy_run_loses_its_own_lines_first():
    """L: 16 MiB wait at most; the lines of quiet runs stay."""
    buffer = make_buffer()
    quiet = buffer.begin(AttemptId(1, 0, 0))
    quiet.add(20, "stdout", "quiet")
    for task in range(2, 7):
        noisy = buffer.begin(AttemptId(task, 0, 0))
        for _ in range(600):
            noisy.add(20, "stdout", "x" * 16_000)
        assert buffer.waiting_bytes <= BUFFER_BYTES
    lines, _ends = taken(buffer)
    assert lines[1] == [(20, "stdout", "quiet")]
    marks = [text for task in range(2, 7) for _, source, text in lines[task] if source == "penstock"]
    assert any("the worker's buffer was full" in mark for mark in marks)
    assert buffer.waiting_bytes == 0


async def test_a_flush_has_something_of_each_run():
    """L: the others' lines do not wait behind those of a noisy run."""
    buffer = make_buffer()
    noisy = buffer.begin(AttemptId(1, 0, 0))
    for _ in range(500):
        noisy.add(20, "stdout", "x" * 16_000)
    buffer.begin(AttemptId(2, 0, 0)).add(20, "stdout", "quiet")
    assert {chunk.run.task_id for chunk in buffer.take(2 * 1024 * 1024)} == {1, 2}


@pytest.mark.parametrize(
    ("logs", "urgent"),
    [
        (lambda run: run.add(20, "stdout", "x"), [False]),
        (lambda run: run.add(40, "stdout", "x"), [True]),
        (lambda run: [run.add(20, "stdout", "x" * 16_000) for _ in range(5)], [False, True]),
        (lambda run: (run.add(20, "stdout", "x"), run.end("done")), [False, True]),
        (lambda run: [run.add(20, "stdout", "x") for _ in range(50)], [False]),
    ],
)
async def test_when_lines_are_shipped_at_once(logs, urgent):
    """L: at 64 KiB, an error, or the end of the attempt; one wake for many lines."""
    woken = []
    logs(make_buffer(woken.append).begin(AttemptId(1, 0, 0)))
    assert woken == urgent


async def test_a_handler_pays_little_for_a_line(tmp_path):
    """L: adding a line takes about three times what a `FileHandler` takes, and no more than six
    times on a busy machine."""
    buffer = make_buffer()
    file = logging.getLogger("to_file")
    file.propagate = False
    file.addHandler(logging.FileHandler(tmp_path / "log"))
    file.setLevel(logging.INFO)

    def cpu_s(logger, count=2_000):
        began = time.thread_time()
        for n in range(count):
            logger.info("line %d of the log, of the usual length for such a line of text", n)
        return time.thread_time() - began

    ratios = []

    async def handler(task):
        ratios.extend(cpu_s(log) / cpu_s(file) for _ in range(5))
        return Done()

    try:
        await run(handler, 1, buffer=buffer)
    finally:
        file.handlers[0].close()
        file.handlers.clear()
    assert min(ratios) < 6, ratios


def test_streams_are_restored():
    """Outside a worker nothing is captured, and `off` captures nothing at all."""
    before = sys.stdout, sys.stderr, list(logging.getLogger().handlers)
    with capturing("off"):
        assert (sys.stdout, sys.stderr) == before[:2]
    with capturing("only"):
        assert sys.stdout is not before[0]
        assert not sys.stdout.closed
    assert (sys.stdout, sys.stderr, list(logging.getLogger().handlers)) == before


async def test_only_leaves_nothing_in_the_workers_own_output(monkeypatch):
    buffer, output = make_buffer(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    run_log = buffer.begin(AttemptId(1, 0, 0))

    from penstock.worker.current import attempt_scope  # noqa: PLC0415 (as below)
    from penstock.worker.outcomes import Task  # noqa: PLC0415 (only this test needs them)

    with capturing("only"):
        with attempt_scope(Task(1, "t", "s", 0, 0, 0, None, run_log=run_log)):
            print("of the task")
        print("of the worker")
    assert output.getvalue() == "of the worker\n"
    assert log_buffer.RunLog is type(run_log)
