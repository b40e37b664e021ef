"""The two ports between the loops of a worker: all that one loop requests from the other.

Parts are made in the order in which attempts pass them: the platform client, then the handler pool
with the port of the client. The client gets the port of the pool when it begins to run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from penstock import process
from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId

if TYPE_CHECKING:
    # That module imports this one.
    from penstock.worker.handler_pool import HandlerPool


class Platform(Protocol):
    """The requests of the loop of handlers to the platform's loop. No call waits for that loop."""

    def add(self, result: StageResult) -> None:
        """Reports the result of an attempt."""

    def report(self, attempt_id: AttemptId, progress: Progress) -> None:
        """Sends a report of a handler; may be called from any thread."""

    def announce(self, attempt_id: AttemptId) -> None:
        """Tells the platform that a suspect begins; `Handlers.begin` follows when it knows."""

    def ended(self, attempt_id: AttemptId) -> None:
        """Waits for the result of a suspect; `Handlers.end_turn` follows when it is stored.

        Otherwise the next attempt could kill the process before, and the loss would be charged to
        both.
        """

    def block(self, blocked: bool) -> None:
        """Sets whether the worker takes no further attempts, because a suspect runs alone."""


class Handlers:
    """The requests of the platform's loop to the loop of handlers; made in the latter.

    Calls arrive there in order. Only `waits` answers.

    Args:
        pool: runs attempts.
        ready: called when tasks can be pulled.

    Attributes:
        pulled: set when no further attempt will be started.
    """

    def __init__(self, pool: HandlerPool, ready: process.Ready) -> None:
        self._pool = pool
        self._ready = ready
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        self.pulled = asyncio.Event()
        self.waits = pool.waits

    def start(self, claimed: list[ReadyTask]) -> None:
        """Runs attempts."""
        self._call_soon(self._pool.start_all, claimed)

    def drop(self, attempt_ids: list[AttemptId]) -> None:
        """Ends attempts without a result."""
        self._call_soon(self._pool.drop, attempt_ids)

    def begin(self, attempt_id: AttemptId) -> None:
        """Begins an announced suspect: the platform knows that it begins."""
        self._call_soon(self._pool.begin, attempt_id)

    def end_turn(self, attempt_id: AttemptId) -> None:
        """Lets the next suspect begin: the result of this one is stored."""
        self._call_soon(self._pool.end_turn, attempt_id)

    def set_ready(self) -> None:
        """Tells that tasks can be pulled; over HTTP also again after `withdraw_ready`."""
        self._call_soon(self._ready)

    def withdraw_ready(self) -> None:
        """Tells that the gateway refuses this worker's credentials."""
        self._call_soon(process.withdraw_ready, "worker")

    def end_pulling(self) -> None:
        """Tells that no further attempt will be started."""
        self._call_soon(self.pulled.set)
