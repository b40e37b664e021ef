"""Servers that processes reach by names, which a test changes and takes away.

A process that starts with `Names.prefix` has a mount namespace with `/etc/hosts` and
`/etc/resolv.conf` of its own. Its names lead to a loopback address, on which the test forwards
connections to the servers. So a test can take the names away, break the connections, and give the
names another address. The names of the machine stay as they are.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from tests.support.gateways import pump

# RFC 6761 reserves `.test`, so no resolver knows the name.
DOMAIN = "penstock.test"
LOOPBACK = "127.0.0.1"
# Of this process: tests of several processes run at the same time.
_RESOLVER = f"127.1.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"
_DNS_PORT = 53


@cache
def missing() -> str | None:
    """Why this machine cannot give processes names of their own; None when a trial succeeds."""
    if shutil.which("unshare") is None:
        return "there is no `unshare` (util-linux) to give processes names of their own"
    trial = subprocess.run(
        ["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/hosts"],
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode:
        return f"giving processes names of their own failed: {trial.stderr.strip()}"
    try:
        _silent_resolver().close()
    except OSError as error:
        return f"port {_DNS_PORT} of {_RESOLVER} is not free for a resolver: {error}"
    return None


def _silent_resolver() -> socket.socket:
    """A socket that receives queries; nothing answers them."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.bind((_RESOLVER, _DNS_PORT))
    except OSError:
        made.close()
        raise
    return made


class Names:
    """The names of some servers, each `HOST.penstock.test`.

    Args:
        folder: for the files that name them.
        hosts: the first part of each name.
        ports: of the servers, which listen on 127.0.0.1.

    Attributes:
        prefix: the beginning of a command line that runs its program with these names.
    """

    def __init__(self, folder: Path, hosts: Sequence[str], ports: Sequence[int]) -> None:
        self._hosts = folder / "hosts"
        self._names = " ".join(f"{host}.{DOMAIN}" for host in hosts)
        self._ports = ports
        self._forwarders: list[asyncio.Server] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._number = 0
        resolv = folder / "resolv.conf"
        resolv.write_text(f"nameserver {_RESOLVER}\n")
        mounts = f"mount --bind {self._hosts} /etc/hosts && mount --bind {resolv} /etc/resolv.conf"
        self.prefix = ("unshare", "-m", "sh", "-c", f'{mounts} && exec "$0" "$@"')

    async def appear(self) -> None:
        """Gives the names an address that they did not have before."""
        self._number += 1
        address = f"127.0.2.{self._number}"
        for port in self._ports:
            self._forwarders.append(await self._forward(address, port))
        self._write(f"{address} {self._names}\n")

    async def vanish(self) -> None:
        """Takes the names away, and then breaks the connections that they led to."""
        self._write("")
        for forwarder in self._forwarders:
            forwarder.close()
        self._forwarders.clear()
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def _write(self, line: str) -> None:
        # In place, because a mount keeps the file that it was made of.
        with self._hosts.open("w") as file:
            file.write(f"127.0.0.1 localhost\n{line}")

    async def _forward(self, address: str, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open.add(writer)
            try:
                there, back = await asyncio.open_connection(LOOPBACK, port)
            except OSError:
                self._open.discard(writer)
                writer.close()
                return
            if writer not in self._open:
                # The names vanished meanwhile: nothing else would break this connection.
                back.transport.abort()
                return
            pair = {writer, back}
            self._open |= pair
            await asyncio.gather(pump(reader, back), pump(there, writer))
            self._open -= pair

        return await asyncio.start_server(serve, address, port)


@asynccontextmanager
async def named(folder: Path, hosts: Sequence[str], ports: Sequence[int]) -> AsyncIterator[Names]:
    """Names for servers on 127.0.0.1; queries for all other names have no answer."""
    folder.mkdir()
    names = Names(folder, hosts, ports)
    with _silent_resolver():
        await names.appear()
        try:
            yield names
        finally:
            await names.vanish()
