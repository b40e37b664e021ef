"""Identity of callback targets. Pure.

A target is one URL in one namespace. Two namespaces that call the same URL have two targets:
health, rate and operators' decisions of one do not affect the other. The namespace is that of the
task type (`core.access.namespace_of`).

The targets of one namespace with the same scheme, name and port are one host. Most platforms call a
URL per task, so a server that hangs has many targets, and its host is what they have in common.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from penstock.core.access import DEFAULT_NAMESPACE, namespace_of


class TargetId(NamedTuple):
    """Identity of a target; sorts by namespace, then URL.

    Attributes:
        namespace: of the task type that calls it.
        url: of the target.
    """

    namespace: str
    url: str

    def __str__(self) -> str:
        """For people: in the default namespace, the URL alone."""
        return self.url if self.namespace == DEFAULT_NAMESPACE else f"{self.url} ({self.namespace})"


def target_of(type_name: str, url: str) -> TargetId:
    """The target of a URL for the tasks of a type."""
    return TargetId(namespace_of(type_name), url)


class HostId(NamedTuple):
    """Identity of a host.

    Attributes:
        namespace: of its targets.
        origin: scheme, name and port, in one spelling.
    """

    namespace: str
    origin: str


_PORTS = {"http": 80, "https": 443}


def host_of(target_id: TargetId) -> HostId:
    """The host of a target; spellings of one origin give one host.

    A URL that cannot be parsed cannot be called either; all such URLs are one host.
    """
    name = name_in(target_id.url)
    try:
        parts = urlsplit(target_id.url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return HostId(target_id.namespace, "")
    return HostId(target_id.namespace, f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{port}")


def name_in(url: str) -> str:
    """The host name or address in a URL, in one spelling; empty when there is none."""
    try:
        name = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def server_of(address: str) -> str | None:
    """The server that an address stands for; None when the text is no address.

    An IPv4 address within an IPv6 address is itself. Other IPv6 addresses stand for their /64,
    because one server can have all addresses of it.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{IPv6Address(int(parsed) >> 64 << 64)}/64"
