"""IP addresses that callbacks may connect to: public ones, and networks that an operator allows.

Clients choose the URLs of callbacks, and a host name resolves to any address its owner likes, at
any moment. So this module checks the numeric address of a socket just before it connects, and never
a URL or a name.

Fails closed: an address of an unknown class is refused.
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
    """Parses networks in CIDR notation; a single address is a network of one.

    Raises:
        ValueError: a text is not a network; names the first one and the reason.
    """
    networks = tuple(ip_network(text) for text in texts)
    for network in networks:
        if isinstance(network, IPv6Network) and network.network_address.scope_id is not None:
            raise ValueError(f"{network} has a scope, and addresses with a scope are never connected to")
    return networks


def refusal(host: str, allowed: Sequence[Network] = ()) -> str | None:
    """The class of an address that must not be connected to, in a word or two; None when it may be.

    Args:
        host: the address that the socket receives. A name is refused, because connecting would
            resolve it again.
        allowed: networks that are allowed although they are not public. An IPv6 network that embeds
            IPv4 addresses (such as NAT64) allows an address only if the embedded IPv4 address is
            public or allowed itself.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return "not numeric"
    # A scope id names a local network interface; no network contains such an address.
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "scoped"
    return _refusal(address, allowed)


def _refusal(address: Address, allowed: Sequence[Network]) -> str | None:
    kind = _kind(address)
    if kind is None or not any(address in network for network in allowed):
        return kind
    for embedded in _embedded(address):
        if inner := _refusal(embedded, allowed):
            return f"{kind} to {inner}"
    return None


def _networks(*texts: str) -> tuple[Network, ...]:
    return parse_networks(texts)


# Networks that embed IPv4 addresses: in the last 32 bits, except 6to4 and Teredo.
_EMBEDDING = {
    "IPv4-mapped": _networks("::ffff:0:0/96"),
    "IPv4-translated": _networks("::ffff:0:0:0/96"),
    "IPv4-compatible": _networks("::/96"),
    # The second network is for local use (RFC 8215); here it must embed the IPv4 address in its
    # last 32 bits.
    "NAT64": _networks("64:ff9b::/96", "64:ff9b:1::/48"),
    "6to4": _networks("2002::/16"),
    "Teredo": _networks("2001::/32"),
}
# Networks that `ipaddress` names differently, or calls global in Python 3.11.7: 3fff::/20, most of
# 192.0.0.0/24 and fec0::/10.
_SPECIAL = {
    "unspecified": _networks("0.0.0.0/8"),
    "shared by carriers": _networks("100.64.0.0/10"),
    "for documentation": _networks(
        "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"
    ),
    "for benchmarks": _networks("198.18.0.0/15", "2001:2::/48"),
    # A public address that reaches the host of the virtual machine inside Azure.
    "a cloud's own": _networks("168.63.129.16"),
    "site-local": _networks("fec0::/10"),
    "reserved": _networks("192.0.0.0/24", "192.88.99.0/24", "2001::/23"),
}
_NAMED = _EMBEDDING | _SPECIAL


def _kind(address: Address) -> str | None:
    """The class of an address that is not public; None for one that is."""
    # :: and ::1 are also in ::/96. The named networks come first: newer Python versions call a
    # mapped loopback address loopback.
    if address.version == 4 or int(address) > 1:
        for name, networks in _NAMED.items():
            if any(address in network for network in networks):
                return name
    properties = {
        "unspecified": address.is_unspecified,
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        # Before "not public": some multicast addresses count as global.
        "multicast": address.is_multicast,
        "reserved": address.is_reserved,
        "private": address.is_private,
        "not public": not address.is_global,
    }
    return next((name for name, applies in properties.items() if applies), None)


def _embedded(address: Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that an address of one of `_EMBEDDING` embeds; empty for others."""
    if isinstance(address, IPv4Address) or int(address) <= 1:
        return ()
    if address.teredo is not None:
        return address.teredo
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if any(address in network for networks in _EMBEDDING.values() for network in networks):
        return (IPv4Address(int(address) & 0xFFFF_FFFF),)
    return ()
