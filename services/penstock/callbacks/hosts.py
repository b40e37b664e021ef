"""The hosts of targets in memory: their health and the addresses of their servers. No I/O.

Most platforms call a URL per task, so no single target of a server that hangs becomes abnormal. The
host is the parent of its targets: when it is abnormal, the callbacks of all of them are diverted.

Guarantees
- One bad target does not divert its host: each counts a few slow calls only, and at least half of
  the host's recent calls must be slow.
- A namespace's calls divert no other namespace's callbacks.

The state is not stored. A new process learns it from the first calls, which are few, because a host
that has not answered yet is not trusted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from penstock.callbacks.settings import CallbacksSettings
from penstock.core.drain import Drain
from penstock.core.health import HealthWindow
from penstock.core.target import HostId, TargetId, host_of, name_in, server_of

# Least share of a host's recent calls that must be slow to make it abnormal.
_SHARE = 0.5
# The count that makes a host abnormal, in multiples of a target's.
_TIMES = 2
# Hosts and names in memory, and how many are looked at for eviction with each new one.
CAPACITY = 20_000
_SCANNED = 2
# Servers of one name that its calls count for.
_MOST_SERVERS = 8
# Stands for the servers of all names that were not resolved yet.
UNRESOLVED = "unresolved"


class Host:
    """One host.

    Attributes:
        id: its identity.
        name: host name or address.
        window: its health.
        drain: how many held callbacks of all its targets may be drained while it is not trusted.
        unresponsive: whether its latest call was slow.
        trusted: whether its latest call was answered in time.
    """

    __slots__ = ("drain", "id", "name", "trusted", "unresponsive", "window")

    def __init__(self, host_id: HostId, name: str, settings: CallbacksSettings) -> None:
        self.id = host_id
        self.name = name
        health = settings.health
        self.window = HealthWindow(
            replace(
                health,
                threshold=_TIMES * health.threshold,
                ceiling=_TIMES * health.ceiling,
                share=max(health.share, _SHARE),
            )
        )
        self.drain = Drain(settings.drain)
        self.unresponsive = False
        self.trusted = False

    @property
    def abnormal(self) -> bool:
        """Whether its circuit breaker is open, so that all its targets are diverted."""
        return self.window.is_abnormal(time.time())


class Hosts:
    """The hosts of the targets in memory.

    Args:
        settings: of the service.
    """

    def __init__(self, settings: CallbacksSettings) -> None:
        self._settings = settings
        self._hosts: OrderedDict[HostId, Host] = OrderedDict()
        self._servers: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def abnormal(self) -> int:
        """How many hosts are abnormal."""
        return sum(host.abnormal for host in self._hosts.values() if host.window.has_count)

    def of(self, target_id: TargetId) -> Host:
        """The host of a target."""
        host_id = host_of(target_id)
        host = self._hosts.get(host_id)
        if host is None:
            host = self._hosts[host_id] = Host(host_id, name_in(target_id.url), self._settings)
            self._evict()
        else:
            self._hosts.move_to_end(host_id)
        return host

    def resolved(self, name: str, addresses: Iterable[str]) -> None:
        """Keeps the servers of a name, as its last resolution found them."""
        servers = sorted({server for address in addresses if (server := server_of(address))})
        self._servers[name.rstrip(".").lower()] = tuple(servers[:_MOST_SERVERS])
        if len(self._servers) > CAPACITY:
            self._servers.popitem(last=False)

    def servers_of(self, host: Host) -> tuple[str, ...]:
        """The servers that the calls of a host use."""
        if (server := server_of(host.name)) is not None:
            return (server,)
        return self._servers.get(host.name) or (UNRESOLVED,)

    def server_of(self, host: Host) -> str:
        """The servers and the port of a host; hosts with the same ones hang together."""
        servers = self.servers_of(host)
        name = host.name if servers == (UNRESOLVED,) else ",".join(servers)
        return f"{name} {host.id.origin.rpartition(':')[2]}"

    def _evict(self) -> None:
        for _ in range(min(_SCANNED, len(self._hosts) - CAPACITY)):
            host_id, host = next(iter(self._hosts.items()))
            if host.window.has_count:
                self._hosts.move_to_end(host_id)
            else:
                del self._hosts[host_id]
