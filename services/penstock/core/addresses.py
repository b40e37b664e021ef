"""Which addresses may be connected to on others' behalf: those of the public internet, and what an operator allows.

Whoever submits a task names its callbacks, and a name means what its owner's DNS says at the moment. So what is judged
is the numeric address that a socket is about to be connected to; names and URLs are nobody's proof of anything.

In doubt an address is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks from their CIDR notation; a lone address is a network of one.

    Raises:
        ValueError: the first that is none, with the reason.
    """
    networks = tuple(ip_network(text) for text in texts)
    for network in networks:
        if isinstance(network, IPv6Network) and network.network_address.scope_id is not None:
            raise ValueError(f"{network} has a scope, and addresses with a scope are never connected to")
    return networks


def refusal(host: str, allowed: Sequence[Network] = ()) -> str | None:
    """Why a socket must not be connected to an address, as its class in a word or two; None when it may be.

    Args:
        host: the address as the socket gets it. What is not numeric is refused: it would be looked up once more.
        allowed: networks that are allowed all the same. One of IPv6 that carries IPv4 addresses, such as that of a
            NAT64, allows those of its addresses whose IPv4 address is public or allowed itself.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return "not numeric"
    # A scope says which of our own links is meant: nobody else's business, and no network contains it.
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "scoped"
    return _refusal(address, allowed)


def _refusal(address: Address, allowed: Sequence[Network]) -> str | None:
    kind = _kind(address)
    if kind is None or not any(address in network for network in allowed):
        return kind
    for carried in _carried(address):
        if inner := _refusal(carried, allowed):
            return f"{kind} to {inner}"
    return None


def _networks(*texts: str) -> tuple[Network, ...]:
    return parse_networks(texts)


# Whoever connects to these reaches the IPv4 address inside: in the last 32 bits but for the last two.
_CARRIERS = {
    "IPv4-mapped": _networks("::ffff:0:0/96"),
    "IPv4-translated": _networks("::ffff:0:0:0/96"),
    "IPv4-compatible": _networks("::/96"),
    # The second is of local use (RFC 8215): as long as it carries 32 bits at the end, else nothing passes.
    "NAT64": _networks("64:ff9b::/96", "64:ff9b:1::/48"),
    "6to4": _networks("2002::/16"),
    "Teredo": _networks("2001::/32"),
}
# What `ipaddress` calls otherwise, does not know, or knows only in later versions than the oldest that we run on: to
# 3.11.7, 3fff::/20, most of 192.0.0.0/24 and all of fec0::/10 are global.
_SPECIAL = {
    "unspecified": _networks("0.0.0.0/8"),
    "shared by carriers": _networks("100.64.0.0/10"),
    "for documentation": _networks(
        "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"
    ),
    "for benchmarks": _networks("198.18.0.0/15", "2001:2::/48"),
    # Public by its number, but inside Azure it is the host below the virtual machine.
    "a cloud's own": _networks("168.63.129.16"),
    "site-local": _networks("fec0::/10"),
    "reserved": _networks("192.0.0.0/24", "192.88.99.0/24", "2001::/23"),
}
_NAMED = _CARRIERS | _SPECIAL


def _kind(address: Address) -> str | None:
    """The class of an address that is not public; None for one that is."""
    # Both are also in ::/96. The other way round, later versions call a mapped loopback address loopback.
    if address.version == 4 or int(address) > 1:
        for name, networks in _NAMED.items():
            if any(address in network for network in networks):
                return name
    known = {
        "unspecified": address.is_unspecified,
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        # Before the last: some multicast addresses count as global.
        "multicast": address.is_multicast,
        "reserved": address.is_reserved,
        "private": address.is_private,
        "not public": not address.is_global,
    }
    return next((name for name, applies in known.items() if applies), None)


def _carried(address: Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that an address of one of `_CARRIERS` carries; none for others."""
    if isinstance(address, IPv4Address) or int(address) <= 1:
        return ()
    if address.teredo is not None:
        return address.teredo
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if any(address in network for networks in _CARRIERS.values() for network in networks):
        return (IPv4Address(int(address) & 0xFFFF_FFFF),)
    return ()
