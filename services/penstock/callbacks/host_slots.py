"""Bounds the slots of one path per namespace, host and server, and of all unresponsive targets.

Isolation of namespaces (C5, O5)
- A namespace leaves some slots free for the others (`core.fair_share`), however many addresses of
  its targets hang. The same holds for the slots of unresponsive targets.

Isolation of hosts (C5)
- A host that has not answered yet, or whose latest call was slow, is not trusted. It may use as
  many slots as two targets, so that one target that hangs leaves some to its neighbours.
- A trusted host may use a share of the path, and as many as the others while few slots are free.
- Trusted targets, whose own latest call was answered in time, have slots of their own at their
  host, as many as a trusted host. Else targets that hang would hold all slots of the host, and no
  answer of a neighbour could make it trusted again.
- The untrusted hosts of one server (`core.target.server_of`) share a few slots, so that names and
  ports of one server gain nothing. Trusted hosts of that server do not wait for them.
- Unresponsive targets, whose latest call was slow, share at most `unresponsive_slots`.

A lane whose host has no slot is set aside until one is free, so it costs nothing while it waits.
No I/O.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from penstock.callbacks.hosts import Host
from penstock.callbacks.settings import LaneBounds
from penstock.core.fair_share import most_used, room_left
from penstock.core.target import HostId, TargetId


class _UnresponsiveTargets(NamedTuple):
    """Counts the slots of all unresponsive targets."""


class _Namespace(NamedTuple):
    """Counts the slots of a namespace, or those of its unresponsive targets."""

    namespace: str
    unresponsive: bool = False


class _TrustedTargets(NamedTuple):
    """Counts the slots of a host's trusted targets."""

    host: HostId


# All unresponsive targets, a namespace, a host, its trusted targets, or a server that untrusted
# hosts use.
_Key = _UnresponsiveTargets | _Namespace | HostId | _TrustedTargets | str
_UNRESPONSIVE = _UnresponsiveTargets()
# Keys that are looked at, per recall, whose lanes may have room since other hosts freed slots.
_SCANNED = 8


class HostSlots:
    """The slots of the hosts on one path.

    Args:
        bounds: of the path.
        host_of: the host of a target.
        servers_of: the servers of a host.
        is_trusted: whether a target's latest call was answered in time.
        is_unresponsive: whether a target's latest call was slow.
    """

    def __init__(
        self,
        bounds: LaneBounds,
        host_of: Callable[[TargetId], Host],
        servers_of: Callable[[Host], tuple[str, ...]],
        is_trusted: Callable[[TargetId], bool],
        is_unresponsive: Callable[[TargetId], bool],
    ) -> None:
        self._bounds = bounds
        self._host_of = host_of
        self._servers_of = servers_of
        self._is_trusted = is_trusted
        self._is_unresponsive = is_unresponsive
        self._used: Counter[_Key] = Counter()
        self._free = bounds.slots
        # The keys that each slot in use counts for, by target.
        self._charged: dict[TargetId, list[tuple[_Key, ...]]] = {}
        self._aside: OrderedDict[_Key, OrderedDict[TargetId, Host]] = OrderedDict()
        self._key_of_aside: dict[TargetId, _Key] = {}
        # Keys with lanes aside that have freed a slot.
        self._freed: dict[_Key, None] = {}
        # Targets with lanes aside whose call has ended, so that other bounds may hold now.
        self._ended: dict[TargetId, None] = {}

    def set_aside(self, target_id: TargetId, *, scarce: bool, ahead: int) -> bool:
        """Sets a lane aside if its host has no slot for it; returns whether it did.

        Args:
            target_id: of the lane.
            scarce: whether few slots of the path are free.
            ahead: slots that the target may use for attempts claimed ahead.
        """
        host = self._host_of(target_id)
        for key in self._keys(target_id, host):
            if self._used[key] >= self._most(key, host, scarce=scarce, ahead=ahead):
                self._aside.setdefault(key, OrderedDict())[target_id] = host
                self._key_of_aside[target_id] = key
                return True
        return False

    def take(self, target_id: TargetId) -> None:
        """Takes a slot."""
        keys = self._keys(target_id, self._host_of(target_id))
        self._used.update(keys)
        self._free -= 1
        self._charged.setdefault(target_id, []).append(keys)

    def free(self, target_id: TargetId) -> None:
        """Frees a slot."""
        charged = self._charged[target_id]
        self._free += 1
        for key in charged.pop():
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
            if key in self._aside:
                self._freed[key] = None
        if not charged:
            del self._charged[target_id]
        if target_id in self._key_of_aside:
            self._ended[target_id] = None

    def drop(self, target_id: TargetId) -> bool:
        """Removes a lane that is set aside; returns whether it was."""
        key = self._key_of_aside.pop(target_id, None)
        if key is None:
            return False
        self._ended.pop(target_id, None)
        lanes = self._aside[key]
        del lanes[target_id]
        if not lanes:
            del self._aside[key]
            self._freed.pop(key, None)
        return True

    def recall(self, *, scarce: bool) -> list[TargetId]:
        """Removes lanes that may have a slot now, and returns them.

        As many as there are free slots: the other lanes would be set aside again. Those of the
        namespace with the fewest slots come first.
        """
        for _ in range(min(_SCANNED, len(self._aside))):
            # Trust and scarcity also change without a freed slot.
            key = next(iter(self._aside))
            self._aside.move_to_end(key)
            self._freed[key] = None
        recalled = [
            target_id
            for target_id in self._ended
            if self._is_trusted(target_id)
            or self._key_of_aside[target_id]
            in (_UNRESPONSIVE, _Namespace(target_id.namespace, unresponsive=True))
        ]
        self._ended.clear()
        for target_id in recalled:
            self.drop(target_id)
        for key in list(self._freed):
            lanes = self._aside[key]
            if isinstance(key, _Namespace):
                room = room_left(self._free_for(key), self._used[key])
            else:
                room = self._most(key, next(iter(lanes.values())), scarce=scarce) - self._used[key]
            if room <= 0:
                del self._freed[key]
            for target_id in list(islice(lanes, max(room, 0))):
                self.drop(target_id)
                recalled.append(target_id)
        return sorted(recalled, key=lambda one: self._used[_Namespace(one.namespace)])

    def __bool__(self) -> bool:
        """Whether lanes are set aside."""
        return bool(self._aside)

    def _keys(self, target_id: TargetId, host: Host) -> tuple[_Key, ...]:
        """The keys that a slot counts for."""
        if self._is_trusted(target_id):
            keys: tuple[_Key, ...] = (_TrustedTargets(host.id),)
        else:
            keys = (host.id,) if host.trusted else (host.id, *self._servers_of(host))
        namespace = target_id.namespace
        if self._is_unresponsive(target_id):
            keys = (_UNRESPONSIVE, _Namespace(namespace, unresponsive=True), *keys)
        return (_Namespace(namespace), *keys)

    def _most(self, key: _Key, host: Host, *, scarce: bool, ahead: int = 0) -> int:
        bounds = self._bounds
        if isinstance(key, str):
            return bounds.server_slots
        if key is _UNRESPONSIVE:
            return bounds.unresponsive_slots
        if isinstance(key, _Namespace):
            return most_used(self._free_for(key))
        trusted = host.trusted or isinstance(key, _TrustedTargets)
        return max(bounds.host_slots, ahead) if trusted and not scarce else bounds.untrusted_slots

    def _free_for(self, key: _Namespace) -> int:
        """Free slots of the pool that a namespace shares with others."""
        unresponsive_free = self._bounds.unresponsive_slots - self._used[_UNRESPONSIVE]
        return unresponsive_free if key.unresponsive else self._free
