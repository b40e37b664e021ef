"""Commands that handlers run: their lines, their status, and their end with the attempt."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.core.log_limits import PARTIAL_CHARS
from penstock.core.redaction import Redactor
from penstock.errors import CommandFailed
from penstock.worker import Done, commands
from penstock.worker.capture import capturing
from penstock.worker.commands import LineSplitter
from penstock.worker.execution import Execution, Stage
from penstock.worker.log_buffer import LogBuffer

READY = ReadyTask(Fence(7, 0, "s", 0), "t", Context.encode(None), 60_000)


@pytest.fixture
def buffer():
    return LogBuffer("w", Redactor({"STORE_PASSWORD": "planted-secret"}), lambda _urgent: None)


def logged(buffer):
    """Source and text of each line."""
    return [line[2:4] for chunk in buffer.take(10**9) for line in chunk.lines]


async def attempt(handler, *, timeout_s=60.0, logs=None):
    stages = {("t", "s"): Stage(handler, timeout_s, None)}
    return await Execution(stages, None, 4, logs).run(READY, pytest.fail)


def shell(script):
    return ["sh", "-c", script]


def both(arguments, **options):
    """An async and a synchronous handler that run a command and return what they found."""

    async def awaits(task):
        found = await task.run(arguments, **options)
        return Done([found.exit_code, list(found.last_lines), found.stdout.decode()])

    def blocks(task):
        found = task.run(arguments, **options)
        return Done([found.exit_code, list(found.last_lines), found.stdout.decode()])

    return awaits, blocks


def is_alive(pid):
    try:
        # A zombie whose parent has not waited for it runs no more.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_lines_are_in_the_log_of_the_task_in_order(buffer):
    """W1: of both streams, with the program as their source, and without secrets."""
    script = "echo one; echo two >&2; printf 'three\\nplanted-secret'"
    for handler in both(shell(script)):
        result = await attempt(handler, logs=buffer)
        assert result.context.decode() == [0, ["one", "two", "three", "[redacted]"], ""]
        assert logged(buffer) == [
            ("sh", "one"),
            ("sh", "two"),
            ("sh", "three"),
            ("sh", "[redacted]"),
        ]


@pytest.mark.parametrize(("mode", "shown"), [("on", "one\n"), ("only", "")])
async def test_the_workers_own_output_has_the_lines_as_it_has_those_of_print(buffer, capsys, mode, shown):
    """L: PENSTOCK_TASK_LOGS decides; no line is twice in the task's log."""
    with capturing(mode):
        for handler in both(shell("echo one")):
            await attempt(handler, logs=buffer)
            assert logged(buffer) == [("sh", "one")]
            assert capsys.readouterr().out == shown
    await attempt(both(shell("echo two"))[0])
    assert capsys.readouterr().out == "two\n"


async def test_a_failed_command_fails_the_attempt_with_its_last_lines(buffer):
    """W1: the error of the task says what the command said, bounded and without secrets."""
    script = "for n in $(seq 100); do echo line $n; done; echo planted-secret; exit 3"
    for handler in both(shell(script)):
        result = await attempt(handler, logs=buffer)
        assert result.outcome is Outcome.FAIL
        assert result.error.kind == "CommandFailed"
        message = result.error.message
        assert message.startswith("sh exited with status 3:\nline 82\n")
        assert message.endswith("line 100\n[redacted]")
        assert "planted" not in result.error.traceback
    seen = []

    async def expects(task):
        found = await task.run(shell("exit 4"), check=False)
        seen.append(found.exit_code)
        with pytest.raises(CommandFailed, match="sh was ended by SIGKILL") as failed:
            await task.run(shell("kill -9 $$"))
        seen.append(failed.value.exit_code)
        return Done()

    assert (await attempt(expects)).outcome is Outcome.DONE
    assert seen == [4, -signal.SIGKILL]


async def test_input_directory_variables_and_captured_output(tmp_path):
    """The command gets the handler's input; captured output is whole, also beyond a pipe."""
    for stdin in ("a" * 300_000, b"a" * 300_000):
        for handler in both(["cat"], stdin=stdin, capture=True):
            assert (await attempt(handler)).context.decode() == [0, [], "a" * 300_000]
    script = "pwd; echo $GREETING $HOME; echo logged >&2; cat"
    for handler in both(shell(script), cwd=tmp_path, env={"GREETING": "hello"}, capture=True):
        found = (await attempt(handler)).context.decode()
        assert found == [0, ["logged"], f"{tmp_path}\nhello {os.environ['HOME']}\n"]


@pytest.mark.parametrize("arguments", ["ls -l", b"ls", [], ()])
async def test_a_line_for_a_shell_is_refused(arguments):
    """O8: the message shows the form."""
    for handler in both(arguments):
        result = await attempt(handler)
        assert result.error.kind == "TypeError"
        assert "run() needs a list" in result.error.message


async def test_a_program_that_is_missing_is_named():
    """O8: the kind is Python's own."""
    for handler in both(["no-such-program"]):
        result = await attempt(handler)
        assert result.error.kind == "FileNotFoundError"
        assert "no-such-program" in result.error.message


# A shell that starts a grandchild; both note their process ids, and ignore SIGTERM if asked to.
FAMILY = "{trap} sh -c '{trap} echo $$; while :; do sleep 0.05; done' & echo $$; while :; do sleep 0.05; done"


class Family:
    """A command with a grandchild that runs until it is ended."""

    def __init__(self, *, stubborn=False, sync=False):
        self.script = FAMILY.format(trap='trap "" TERM;' if stubborn else "")
        self.buffer = LogBuffer("w", Redactor({}), lambda _urgent: None)
        self.pids = []
        self.left = threading.Event()
        self.handler = self.blocks if sync else self.awaits

    async def awaits(self, task):
        try:
            await task.run(shell(self.script))
        finally:
            self.left.set()

    def blocks(self, task):
        try:
            task.run(shell(self.script))
        finally:
            self.left.set()

    def start(self, **options):
        return asyncio.ensure_future(attempt(self.handler, logs=self.buffer, **options))

    async def begun(self):
        def both_noted():
            self.pids += [int(text) for _source, text in logged(self.buffer)]
            return len(self.pids) == 2

        await wait_until(both_noted)
        assert all(map(is_alive, self.pids))

    async def over(self):
        await wait_until(lambda: not any(map(is_alive, self.pids)), what="both processes have ended")
        await wait_until(self.left.is_set, what="the handler has been left")


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_cancelled_attempt_ends_its_command_and_what_that_started(sync, stubborn, monkeypatch):
    """W1: cancelled, revoked, lost or drained; SIGKILL follows where SIGTERM is ignored."""
    monkeypatch.setattr(commands, "END_S", 0.2)
    family = Family(stubborn=stubborn, sync=sync)
    running = family.start()
    await family.begun()
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    if not sync:
        # Its slot is free when its processes have ended, and not before.
        assert not is_alive(family.pids[1])
    await family.over()


@pytest.mark.parametrize("sync", [False, True])
async def test_a_timeout_ends_the_command(sync):
    """W1: the attempt fails as after any timeout."""
    family = Family(sync=sync)
    running = family.start(timeout_s=1.0)
    await family.begun()
    result = await running
    assert (result.outcome, result.error.kind) == (Outcome.FAIL, "Timeout")
    await family.over()


async def test_a_second_cancellation_kills_at_once():
    """At the end of the worker: nothing may outlive it."""
    family = Family(stubborn=True)
    running = family.start()
    await family.begun()
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    await family.over()


async def test_what_a_command_leaves_behind_ends_with_it(buffer):
    """W1: a grandchild in the background keeps neither the pipe nor the processor."""
    script = "sh -c 'echo $$; while :; do sleep 0.05; done' & sleep 0.2; exit 0"
    for handler in both(shell(script)):
        result = await attempt(handler, logs=buffer)
        [(_source, pid)] = logged(buffer)
        assert result.outcome is Outcome.DONE
        await wait_until(lambda pid=int(pid): not is_alive(pid))


async def test_a_command_on_a_thread_of_an_async_handler_ends_with_the_attempt():
    """The handler cannot cancel its thread; the end of the attempt ends the command."""
    family = Family()

    async def handler(task):
        await asyncio.to_thread(family.blocks, task)

    family.handler = handler
    running = family.start()
    await family.begun()
    running.cancel()
    await asyncio.wait({running})
    await family.over()


async def test_no_command_begins_after_the_attempt_was_cancelled():
    """A synchronous handler that goes on after its cancellation starts nothing more."""
    began, go_on, ended = threading.Event(), threading.Event(), []

    def handler(task):
        began.set()
        go_on.wait()
        try:
            task.run(["touch", "/nowhere/file"])
        except asyncio.CancelledError:
            ended.append(task.cancelled)

    running = asyncio.ensure_future(attempt(handler))
    await wait_until(began.is_set)
    running.cancel()
    await asyncio.wait({running})
    go_on.set()
    await wait_until(lambda: ended == [True])


async def test_a_worker_that_ends_leaves_no_command(tmp_path):
    """A thread of a handler may outlive the worker; its command does not."""
    program = (
        "import threading, time, os\n"
        "from penstock.worker.commands import Command\n"
        "command = Command(['sh', '-c', 'echo $$ > pid; mv pid done; while :; do sleep 0.05; done'], None)\n"
        "threading.Thread(target=command.run, daemon=True).start()\n"
        "while not os.path.exists('done'): time.sleep(0.01)\n"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=True, cwd=tmp_path)
    pid = int((tmp_path / "done").read_text())
    await wait_until(lambda: not is_alive(pid))


def test_lines_are_the_same_for_each_division_of_a_stream():
    """A progress bar is its last state; text that is not UTF-8 is kept; a line without an end is
    bounded."""
    data = "a\nbé\r\n10 %\r20 %\r\nlast".encode()
    for size in range(1, len(data) + 1):
        splitter = LineSplitter()
        found = [
            line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])
        ] + splitter.feed(b"", final=True)
        assert found == ["a", "bé", "20 %", "last"], size
    splitter = LineSplitter()
    assert splitter.feed(b"\xff\n") == ["\ufffd"]
    # No part of a long line begins within a secret.
    assert splitter.feed(b"x" * PARTIAL_CHARS + b"password") == []
    assert splitter.feed(b"=planted", final=True) == ["x" * PARTIAL_CHARS]
