"""A worker's link to the broker, which drops a configured share of packets.

The worker runs in a network namespace that has only one end of a point-to-point link (a TUN device,
no loopback). This process has both ends and forwards the packets. The scenario's seed determines
the loss, separately for each direction. Neither `tc netem` nor a packet filter is needed, which
many kernels lack. The broker advertises 127.0.0.1, so both ends route that address over the link
(`route_localnet`).
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
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from penstock.local.ports import LOOPBACK

_TUN = Path("/dev/net/tun")
# From <linux/if_tun.h>: IP packets without an additional header.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_LARGEST_PACKET = 65_535


class Link:
    """A link, which forwards all packets at once until `drop` is called or `delay_s` is set.

    Attributes:
        prefix: the beginning of a command line that runs its program at the far end.
        loss_out: share of dropped packets from the worker, from 0 to 1.
        loss_in: share of dropped packets to the worker, from 0 to 1.
        delay_s: how long each packet takes, in seconds.
    """

    def __init__(self, prefix: tuple[str, ...], near: int, far: int, rng: random.Random) -> None:
        self.prefix = prefix
        self.loss_out = self.loss_in = self.delay_s = 0.0
        self._near, self._far = near, far
        self._rng = rng
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="link", daemon=True)
        self._thread.start()

    def drop(self, *, out: float = 0.0, back: float = 0.0) -> None:
        """Sets the shares of dropped packets in both directions, from 0 to 1."""
        self.loss_out, self.loss_in = out, back

    def close(self) -> None:
        """Stops forwarding."""
        self._closed.set()
        self._thread.join()

    def _forward(self) -> None:
        # When a packet arrives, where, and the packet.
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._closed.is_set():
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            readable, _, _ = select.select([self._near, self._far], [], [], wait_s)
            for end in readable:
                packet = os.read(end, _LARGEST_PACKET)
                outward = end == self._far
                if self._rng.random() >= (self.loss_out if outward else self.loss_in):
                    arrival_s = time.monotonic() + self.delay_s
                    under_way.append((arrival_s, self._near if outward else self._far, packet))
            # A link keeps the order of packets, when its delay becomes shorter, too.
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                _write(end, packet)


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError as error:
        # A device that is down, or a full queue, drops the packet, as on any network.
        if error.errno not in (errno.EIO, errno.EINVAL, errno.EAGAIN, errno.ENOBUFS):
            raise


@cache
def missing() -> str | None:
    """Why this machine cannot create such a link; None when a trial succeeds."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2) to create a network namespace"
    if not _TUN.exists():
        return "there is no /dev/net/tun for a link into a network namespace"
    try:
        with link(random.Random(0)):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"creating a network namespace with a link failed: {reason}"


@contextmanager
def link(rng: random.Random) -> Iterator[Link]:
    """Creates a namespace and its link for the duration of a `with` block.

    Raises:
        OSError, CalledProcessError: creating it is not permitted.
    """
    # Device names are unique on a machine; the tag avoids conflicts with other runs.
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
        for name, address, peer, namespace_option in (
            (near, f"{net}.1", f"{net}.2", ()),
            (far, f"{net}.2", f"{net}.1", ("-n", space)),
        ):
            _ip(*namespace_option, "addr", "add", address, "peer", peer, "dev", name)
            _ip(*namespace_option, "link", "set", name, "up")
        setting = "/proc/sys/net/ipv4/conf/{}/route_localnet"
        Path(setting.format(near)).write_text("1")
        inside = ("ip", "netns", "exec", space)
        subprocess.run([*inside, "tee", setting.format(far)], input=b"1", check=True, capture_output=True)
        _ip("-n", space, "route", "add", LOOPBACK, "dev", far, "src", f"{net}.2")
        new_link = Link(inside, *ends, rng)
        stack.callback(new_link.close)
        yield new_link


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
