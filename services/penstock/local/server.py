"""The base class of the embedded servers: the supervisor runs each of them as a program."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from penstock.errors import CannotStart
from penstock.local.supervisor import Program, Supervisor


class EmbeddedServer(ABC):
    """The server of one data directory.

    Args:
        supervisor: runs the server and restarts it when it dies.
        directory: folder of the server's files; created when missing.
        name: name of its program in the supervisor.
        title: for messages.
        port: preferred port; a free one is chosen when it is taken. 0 means no preference.
        order: see `Program.order`.
    """

    def __init__(
        self, supervisor: Supervisor, directory: Path, name: str, title: str, *, port: int, order: int
    ) -> None:
        self._supervisor = supervisor
        self._directory = directory.absolute()
        self._name = name
        self._title = title
        self._preferred = port
        self._order = order
        self._program: Program | None = None
        self.port = 0

    async def wait_ready(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the server serves, across restarts.

        Raises:
            CannotStart: it does not serve within `timeout_s` seconds.
        """
        await self._wait(timeout_s, starts=False)

    async def stop(self) -> None:
        """Shuts the server down and ends its connections; `start` restarts it on the same port."""
        await asyncio.to_thread(self._supervisor.stop, self._name)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to the server; the supervisor restarts a server that ends."""
        self._supervisor.kill(self._name, signal_number)

    async def _start(self, prepare: Callable[[], Program], timeout_s: float) -> None:
        """Prepares the program unless that was done before, starts it, and waits until it serves.

        Raises:
            CannotStart: the server does not start; the message has its last log lines.
        """
        if self._program is None:
            self._program = await asyncio.to_thread(prepare)
        self._supervisor.start(self._program)
        await self._wait(timeout_s, starts=True)

    async def _wait(self, timeout_s: float, *, starts: bool) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._serves():
            tail = self._supervisor.tail(self._name)
            if starts and self._supervisor.exits(self._name) > self._tolerated_exits(tail):
                raise CannotStart(f"{self._title} does not start; its last log lines:\n{tail}")
            if asyncio.get_running_loop().time() > deadline:
                raise CannotStart(
                    f"{self._title} does not serve after {timeout_s:.0f} s; its last log lines:\n{tail}"
                )
            await asyncio.sleep(0.05)

    @abstractmethod
    def _serves(self) -> bool:
        """Whether the server accepts connections."""

    def _tolerated_exits(self, _tail: str) -> int:
        """How often the program may end before it serves."""
        return 0
