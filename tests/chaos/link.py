"""A worker's link to the broker, which drops what it is told to drop.

The worker runs in a network namespace that has nothing but one end of a point-to-point line (a TUN device, without even
a loopback); this process holds both ends and carries the packets. So loss is drawn from the scenario's seed, each way
on its own, and neither `tc netem` nor a packet filter is needed, which many kernels (ours, too) come without. The broker
advertises 127.0.0.1: both ends route that address over the line (`route_localnet`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from penstock.local.ports import LOOPBACK

_TUN = Path("/dev/net/tun")
# From <linux/if_tun.h>: IP packets without a header of their own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_LARGEST_PACKET = 65_535


class Link:
    """The line; carries everything until told otherwise.

    Attributes:
        prefix: the command in front of a program's that puts it at the far end.
        loss_out: share of the worker's packets that is dropped, from 0 to 1.
        loss_in: the same of the packets to the worker.
    """

    def __init__(self, prefix: tuple[str, ...], near: int, far: int, chance: random.Random) -> None:
        self.prefix = prefix
        self.loss_out = self.loss_in = 0.0
        self._near, self._far = near, far
        self._chance = chance
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()

    def drop(self, *, out: float = 0.0, back: float = 0.0) -> None:
        """From now on these shares are dropped."""
        self.loss_out, self.loss_in = out, back

    def close(self) -> None:
        """Carries nothing more."""
        self._closed.set()
        self._thread.join()

    def _carry(self) -> None:
        while not self._closed.is_set():
            readable, _, _ = select.select([self._near, self._far], [], [], 0.1)
            for end in readable:
                packet = os.read(end, _LARGEST_PACKET)
                outward = end == self._far
                if self._chance.random() >= (self.loss_out if outward else self.loss_in):
                    _put(self._near if outward else self._far, packet)


def _put(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError as error:
        # What a device that is not up, or a stack that is full, does not take is lost, as on any line.
        if error.errno not in (errno.EIO, errno.EINVAL, errno.EAGAIN, errno.ENOBUFS):
            raise


@cache
def missing() -> str | None:
    """Why no such link can be made here; None when it can, which is tried."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2), with which to make a network namespace"
    if not _TUN.exists():
        return "there is no /dev/net/tun, of which to make a line into a network namespace"
    try:
        with link(random.Random(0)):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"no network namespace with a line to it may be made here: {told}"


@contextmanager
def link(chance: random.Random) -> Iterator[Link]:
    """A namespace and its line for the time of a `with` block.

    Raises:
        OSError, CalledProcessError: it is not permitted.
    """
    # Of this machine at most one end each: the name tells them from those of other runs.
    tag = secrets.token_hex(4)
    near, far, space = f"psn{tag}", f"psf{tag}", f"penstock-{tag}"
    net = f"10.251.{int(tag[:2], 16)}"
    with ExitStack() as stack:
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "del", space)
        ends = [_tun(name) for name in (near, far)]
        for end in ends:
            stack.callback(os.close, end)
        _ip("link", "set", far, "netns", space)
        for name, own, other, where in (
            (near, f"{net}.1", f"{net}.2", ()),
            (far, f"{net}.2", f"{net}.1", ("-n", space)),
        ):
            _ip(*where, "addr", "add", own, "peer", other, "dev", name)
            _ip(*where, "link", "set", name, "up")
        setting = "/proc/sys/net/ipv4/conf/{}/route_localnet"
        Path(setting.format(near)).write_text("1")
        inside = ("ip", "netns", "exec", space)
        subprocess.run([*inside, "tee", setting.format(far)], input=b"1", check=True, capture_output=True)
        _ip("-n", space, "route", "add", LOOPBACK, "dev", far, "src", f"{net}.2")
        line = Link(inside, *ends, chance)
        stack.callback(line.close)
        yield line


def _tun(name: str) -> int:
    end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
