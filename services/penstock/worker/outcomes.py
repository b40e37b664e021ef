"""The argument and the outcomes of a handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Generic, cast

from penstock.contracts.progress import Progress
from penstock.core.attempt import AttemptId
from penstock.worker.commands import Command, Finished
from penstock.worker.log_buffer import RunLog
from penstock.worker.progress import progress_of
from penstock.worker.task_log import TaskLog

if TYPE_CHECKING:
    # With a default, so that `Task` alone is `Task[Any]`. Type checkers need no such package.
    from typing_extensions import TypeVar

    C = TypeVar("C", default=Any)
else:
    from typing import TypeVar

    C = TypeVar("C")


# Several threads of one handler may begin their first commands.
_first_command = threading.Lock()


class _Keep:
    """Marks a context that stays as it is."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = _Keep()


# Not frozen, for speed: a frozen instance takes several times as long to create.
@dataclass(slots=True)
class Task(Generic[C]):
    """One attempt of one stage.

    `Task[Video]` has a context of the type `Video`: a dataclass, TypedDict, msgspec Struct,
    pydantic model or type of JSON. `Task` alone has it as it was submitted.

    Attributes:
        id: task id.
        type: task type.
        stage: the stage to run.
        step: number of this stage in the task's sequence of stages; 0 is the first.
        attempt: number of the attempt of this stage; 0 is the first.
        tries: failed and lost attempts of this stage so far.
        context: of the submission or the stage before: any JSON value, `str` for text and URL,
            `bytes` for bytes; or what the handler's annotation names.
        cancelled: True once the attempt was cancelled, was lost, or is out of time. A synchronous
            handler should check it regularly and return early. An async handler is cancelled
            instead.
        run_log: where `log` writes; for the SDK.
    """

    id: int
    type: str
    stage: str
    step: int
    attempt: int
    tries: int
    context: C
    cancelled: bool = False
    run_log: RunLog | None = field(default=None, repr=False, compare=False)
    _report: Callable[[AttemptId, Progress], object] | None = field(default=None, repr=False, compare=False)
    _commands: set[Command] | None = field(default=None, repr=False, compare=False)
    # Removes secrets; None leaves texts as they are.
    _redact: Callable[[str], str] | None = field(default=None, repr=False, compare=False)

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """Reports how far this attempt is; it counts as a sign of life.

        A call takes microseconds and waits for nothing, so a handler may call it for each of its
        items, also from a thread. The worker sends the last report of each attempt, at most once a
        second.

        Args:
            fraction: the part that is done, from 0 to 1; None when it is not known.
            message: a line for people, also in the task's log; control characters become spaces,
                secrets are redacted, and what is longer than 200 characters is cut.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the fraction is not from 0 to 1.
        """
        reported = progress_of(fraction, message, self._redact)
        if self.run_log is not None:
            self.run_log.add_progress(reported)
        if self._report is not None:
            self._report(AttemptId(self.id, self.step, self.attempt), reported)

    def run(
        self,
        arguments: Sequence[str | PurePath],
        *,
        cwd: str | PurePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        capture: bool = False,
        check: bool = True,
    ) -> Finished:
        """Runs a command: `await task.run([…])` in an async handler, `task.run([…])` on a thread.

        Its output goes to the task's log line by line, with the program as the source. The command
        and what it started end with the attempt: at its timeout, when its task is cancelled, and
        when the worker stops.

        Args:
            arguments: the program and its arguments; there is no shell.
            cwd: directory in which it runs; by default the worker's.
            env: variables beside those of the worker.
            stdin: what it reads; by default nothing.
            capture: returns standard output in place of logging it; standard error is logged.
            check: raises for a status other than 0.

        Raises:
            CommandFailed: its status is not 0; the message has its last lines.
            OSError: it cannot be started.
            CancelledError: the attempt was cancelled or is out of time.
        """
        command = Command(arguments, self.run_log, cwd=cwd, env=env, stdin=stdin, capture=capture)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with self._running(command):
                return command.checked(command.run(), check=check)
        # A coroutine, so that Python warns when it is not awaited.
        return cast("Finished", self._run_in_thread(command, check=check))

    async def _run_in_thread(self, command: Command, *, check: bool) -> Finished:
        with self._running(command):
            return command.checked(await command.run_in_thread(), check=check)

    @contextmanager
    def _running(self, command: Command) -> Iterator[None]:
        with _first_command:
            if self._commands is None:
                self._commands = set()
        self._commands.add(command)
        # Afterwards, because another thread cancels the attempt and then ends its commands.
        if self.cancelled:
            command.end()
        try:
            yield
        finally:
            self._commands.discard(command)

    def cancel(self) -> None:
        """Marks the attempt as cancelled, and ends its commands; for the SDK."""
        self.cancelled = True
        self.end_commands()

    def end_commands(self) -> None:
        """Ends the commands that run; for the SDK."""
        if self._commands:
            for command in tuple(self._commands):
                command.end()

    @property
    def token(self) -> str:
        """The same for all attempts of this step: an idempotency key for side effects.

        Another attempt must repeat the same side effect, so its key is the same. A handler with
        several side effects adds a name to it: `f"{task.token}-refund"`.
        """
        return f"{self.id}-{self.step}"

    @property
    def attempt_id(self) -> str:
        """The identity of this attempt as text: task id, step and attempt.

        Each attempt has another one. It suits names of temporary files, which an earlier attempt
        may still write. It is no idempotency key.
        """
        return f"{self.id}-{self.step}-{self.attempt}"

    @property
    def log(self) -> TaskLog:
        """The task's log, for lines with fields: `task.log.info("encoded", frames=3000)`."""
        return TaskLog(self.run_log)


@dataclass(frozen=True, slots=True)
class Next:
    """The task continues with another stage.

    Attributes:
        stage: name of the stage; the same stage is allowed.
        context: its context; by default the context stays as it is.
        delay_s: seconds until the stage may start.
    """

    stage: str
    context: Any = KEEP
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The task has succeeded with a result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """This attempt has failed.

    Attributes:
        reason: one sentence.
        permanent: the stage is not tried again.
    """

    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """This stage runs again later, without counting as a failure.

    Attributes:
        delay_s: seconds until it may start.
        reason: for the task's history.
    """

    delay_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """A task that a stage spawns.

    Attributes:
        type: its task type, of the same namespace.
        context: any JSON value.
        stage: its first stage; by default that of its type.
        key: its concurrency key.
        priority: HIGHEST, HIGH, MEDIUM, LOW or LOWEST; by default that of the task.
    """

    type: str
    context: Any = None
    stage: str | None = None
    key: str | None = None
    priority: str | None = None


@dataclass(frozen=True, slots=True)
class Spawn:
    """The task waits for children, and then enters a stage. It holds no worker meanwhile.

    The context of that stage is `{"context": …, "children": {"total": …, "succeeded": …,
    "unsuccessful": …, "results": […]}}`, with null in place of each result that there is not.

    Attributes:
        children: at most a million, in the order of their results.
        then: the stage that the task enters when all children, or k of them, have ended.
        context: for that stage.
        k: successful children that suffice; the others are then cancelled.
        parallel: children that exist at the same time.
    """

    children: Iterable[Child]
    then: str
    context: Any = None
    k: int | None = None
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """The task waits for an event, and then enters a stage. It holds no worker meanwhile.

    The event may come before the task begins to wait. The context of the stage is
    `{"context": …, "event": data of the event or null, "timed_out": true or false}`.

    Attributes:
        event: name of the event.
        then: the stage that the task enters.
        context: for that stage.
        key: of the event.
        timeout_s: seconds after which it enters the stage without the event; by default never.
    """

    event: str
    then: str
    context: Any = None
    key: str = ""
    timeout_s: float | None = None


Outcome = Next | Done | Fail | RetryAfter | Spawn | Wait
