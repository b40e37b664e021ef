"""Decides whether a `Host` names this server, as a defence against DNS rebinding.

A page of another site can make its own name lead to this server. A browser then takes both for the
same site, and lets the page read and change everything. The name stays foreign, so the server
refuses each name that is not known to be its own. An address cannot lead elsewhere, so a server on
the network answers to every address: probes and scrapes name that of a pod.

Fails closed: a value of an unknown form is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_HOST = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
# A browser reads such a name as an address; `ip_address` reads only the usual form.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
_ANY = "*."

Host = str | IPv4Address | IPv6Address


@dataclass(frozen=True)
class HostPolicy:
    """The hosts that one listener answers.

    Attributes:
        hosts: names in lower case and addresses.
        suffixes: ends of further names, each with its first dot.
        addresses: whether every address is allowed, rather than those of loopback.
    """

    hosts: frozenset[Host]
    suffixes: tuple[str, ...]
    addresses: bool

    @classmethod
    def of(cls, listens_on: str, names: Iterable[str]) -> HostPolicy:
        """The policy of a listener.

        Args:
            listens_on: the address or name that it listens on.
            names: further hosts without fault (`hosts_fault`).
        """
        entries = [name.lower() for name in (*names, listens_on)]
        return cls(
            hosts=frozenset(
                ("localhost", *(_address(entry) or entry for entry in entries if not entry.startswith(_ANY)))
            ),
            suffixes=tuple(entry[1:] for entry in entries if entry.startswith(_ANY)),
            addresses=not is_loopback(listens_on),
        )

    def allows(self, authority: str) -> bool:
        """Whether a value of `Host`, with or without a port, names this server."""
        host = parse_host(authority)
        if host is None:
            return False
        if isinstance(host, str):
            return host in self.hosts or host.endswith(self.suffixes)
        if host.is_unspecified:
            # Some systems connect it to loopback, and browsers treat it like a public address.
            return False
        return self.addresses or host.is_loopback or host in self.hosts


def parse_host(authority: str) -> Host | None:
    """The name in lower case without its last dot, or the address; None for any other form."""
    match = _HOST.fullmatch(authority)
    # Lower case makes ASCII of some other letters.
    if match is None or not authority.isascii() or int(match["port"] or 0) > 65_535:
        return None
    host = match["host"].lower()
    if host.startswith("["):
        address = _address(host[1:-1])
        return address if isinstance(address, IPv6Address) and address.scope_id is None else None
    if isinstance(address := _address(host), IPv4Address):
        return address
    name = host.removesuffix(".")
    return name if _NAME.fullmatch(name) and not _NUMERIC.fullmatch(name) else None


def hosts_fault(names: Sequence[str]) -> str | None:
    """The fault of the first entry that is no name, `*.` and a name, or address."""
    for name in names:
        if _address(name) is None and not isinstance(parse_host(name.removeprefix(_ANY)), str):
            return f"{name!r} must be a host name, *. and a name, or an address, without scheme and port"
        if ":" in name and _address(name) is None:
            return f"{name!r} has a port, and every port is allowed: leave it out"
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there; False when in doubt."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
