"""Addresses that callbacks may connect to, compared with the IANA registries."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.addresses import parse_networks, refusal

# First and last address of each non-public network, and the class of its refusal.
REFUSED = {
    "unspecified": ["0.0.0.0", "0.0.0.1", "0.255.255.255", "::"],
    "private": [
        *("10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.0", "192.168.255.255"),
        *("fc00::", "fd00:ec2::254", "fd20:ce::254", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ],
    "shared by carriers": ["100.64.0.0", "100.100.100.200", "100.127.255.255"],
    "loopback": ["127.0.0.0", "127.0.0.1", "127.255.255.255", "::1"],
    "link-local": ["169.254.0.0", "169.254.169.254", "169.254.255.255", "fe80::", "fe80::1", "febf:ffff::1"],
    "reserved": [
        *("192.0.0.0", "192.0.0.8", "192.0.0.192", "192.0.0.255", "192.88.99.0", "192.88.99.255"),
        *("240.0.0.0", "255.255.255.254", "255.255.255.255"),
        *(
            "64:ff9c::1",
            "100::",
            "100::ffff:ffff:ffff:ffff",
            "200::1",
            "400::1",
            "2001:1::1",
            "2001:1ff:ffff::1",
        ),
        *("4000::1", "5f00::", "5f00:ffff::1", "8000::1", "e000::1", "fe00::1"),
    ],
    "for documentation": [
        *("192.0.2.0", "192.0.2.255", "198.51.100.0", "198.51.100.255", "203.0.113.0", "203.0.113.255"),
        *("2001:db8::", "2001:db8:ffff::1", "3fff::", "3fff:fff:ffff::1"),
    ],
    "for benchmarks": ["198.18.0.0", "198.19.255.255", "2001:2::", "2001:2:0:ffff::1"],
    "a cloud's own": ["168.63.129.16"],
    "multicast": ["224.0.0.0", "224.0.1.1", "239.255.255.255", "ff00::", "ff02::1", "ff0e::1"],
    "site-local": ["fec0::", "feff:ffff::1"],
    "IPv4-mapped": [
        "::ffff:0:0",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::ffff:8.8.8.8",
        "::ffff:255.255.255.255",
    ],
    "IPv4-translated": ["::ffff:0:7f00:1", "::ffff:0:808:808"],
    "IPv4-compatible": ["::2", "::127.0.0.1", "::8.8.8.8", "::255.255.255.255"],
    "NAT64": [
        *("64:ff9b::", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b::ffff:ffff"),
        *("64:ff9b:1::", "64:ff9b:1::7f00:1", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff"),
    ],
    "6to4": ["2002::", "2002:7f00:1::1", "2002:808:808::1", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff"],
    "Teredo": ["2001::", "2001:0:808:808::f7f7:f7f7", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff"],
    "scoped": ["fe80::1%eth0", "::1%lo", "::1%25lo", "2606:4700::1111%1"],
    # Texts that a resolver or the kernel could read as addresses, and other texts.
    "not numeric": [
        *(
            "localhost",
            "127.1",
            "2130706433",
            "0x7f.1",
            "0x7f000001",
            "0177.0.0.1",
            "017700000001",
            "127.0.0.1.",
        ),
        *("127.0.0.01", "127.000.000.001", "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "[::1]"),
        *(
            "",
            " 127.0.0.1",
            "127.0.0.1 ",
            "127.0.0.1\n",
            "127.0.0.1\0.example.com",
            "::1/128",
            "/run/some.sock",
        ),
    ],
}
# Neighbours of refused networks, and public DNS servers.
PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *("128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "191.255.255.255"),
    *("192.0.1.0", "192.0.3.0", "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0"),
    *("168.63.129.15", "168.63.129.17", "198.17.255.255", "198.20.0.0", "198.51.99.255", "198.51.101.0"),
    *(
        "203.0.112.255",
        "203.0.114.0",
        "223.255.255.255",
        "2000::1",
        "2001:200::1",
        "2001:db7::1",
        "2001:db9::1",
    ),
    *("2001:4860:4860::8888", "2003::1", "2606:4700:4700::1111", "2a00:1450:4001::1", "3ffe:ffff::1"),
]

ANY_ADDRESS = st.one_of(
    st.integers(0, 2**32 - 1).map(IPv4Address),
    st.integers(0, 2**128 - 1).map(IPv6Address),
    # The public part of IPv6; nearly all the rest is reserved.
    st.integers(2**125, 2**126 - 1).map(IPv6Address),
)


@pytest.mark.parametrize(
    ("host", "kind"), [(host, kind) for kind, hosts in REFUSED.items() for host in hosts]
)
def test_what_is_not_public_is_refused_by_its_class(host, kind):
    """C7: every non-public network is refused at its edges and in every form."""
    assert refusal(host) == kind


@pytest.mark.parametrize("host", PUBLIC)
def test_what_is_public_is_not_refused(host):
    """C7: the neighbours of refused networks may be called."""
    assert refusal(host) is None


@given(address=ANY_ADDRESS)
def test_nothing_passes_that_python_does_not_call_global(address):
    """C7: networks that are registered later are refused once Python knows them."""
    assert refusal(str(address)) is not None or (address.is_global and not address.is_multicast)


@given(inner=st.integers(0, 2**32 - 1))
@example(inner=int(IPv4Address("8.8.8.8")))
@example(inner=int(IPv4Address("127.0.0.1")))
def test_an_address_that_carries_another_is_refused_whatever_it_carries(inner):
    """C7: addresses that embed IPv4 addresses are refused, with a class per network."""
    for prefix, shift in (
        ("::ffff:0:0", 0),
        ("::ffff:0:0:0", 0),
        ("::", 0),
        ("64:ff9b::", 0),
        ("2002::", 80),
    ):
        assert refusal(str(IPv6Address(int(IPv6Address(prefix)) | inner << shift))) is not None


@given(address=ANY_ADDRESS, length=st.integers(0, 128))
def test_an_allow_list_allows_what_is_in_it_and_nothing_else(address, length):
    """C7: an allowed network allows its own addresses only."""
    network = ip_network(f"{address}/{min(length, address.max_prefixlen)}", strict=False)
    host, kind = str(address), refusal(str(address))
    carries = {"IPv4-mapped", "IPv4-translated", "IPv4-compatible", "NAT64", "6to4", "Teredo"}
    if kind not in carries:
        assert refusal(host, [network]) is None
    outside = parse_networks(["198.18.5.0/24", "2001:2::5:0/112"])
    if not any(address in other for other in outside):
        assert refusal(host, outside) == kind


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [
        # An allowed IPv4 network does not allow addresses that embed it, and vice versa.
        ("127.0.0.1", "127.0.0.0/8", None),
        ("::1", "127.0.0.0/8", "loopback"),
        ("::ffff:127.0.0.1", "127.0.0.0/8", "IPv4-mapped"),
        ("127.0.0.1", "::ffff:0:0/96", "loopback"),
        ("::ffff:127.0.0.1", "::ffff:0:0/96", "IPv4-mapped to loopback"),
        ("::ffff:127.0.0.1", "::ffff:0:0/96,127.0.0.0/8", None),
        ("::ffff:8.8.8.8", "::ffff:0:0/96", None),
        # An IPv6-only network with NAT64 reaches the internet through it, but no private address.
        ("64:ff9b::808:808", "64:ff9b::/96", None),
        ("64:ff9b::7f00:1", "64:ff9b::/96", "NAT64 to loopback"),
        ("64:ff9b::a9fe:a9fe", "64:ff9b::/96", "NAT64 to link-local"),
        ("64:ff9b:1::808:808", "64:ff9b:1::/96", None),
        ("64:ff9b:1::a00:1", "64:ff9b:1::/48", "NAT64 to private"),
        ("::a00:1", "::/96", "IPv4-compatible to private"),
        ("::ffff:0:a00:1", "::/0", "IPv4-translated to private"),
        ("2002:a00:1::1", "2002::/16", "6to4 to private"),
        ("2002:808:808::1", "2002::/16", None),
        # Teredo with server 8.8.8.8 and client 127.0.0.1, then vice versa.
        ("2001:0:808:808::80ff:fffe", "2001::/32", "Teredo to loopback"),
        ("2001:0:7f00:1::f7f7:f7f7", "2001::/32", "Teredo to loopback"),
        ("2001:0:808:808::f7f7:f7f7", "2001::/32", None),
        # A scoped address is never allowed; ::1 is in ::/96 but embeds no IPv4 address.
        ("fe80::1%eth0", "fe80::/10", "scoped"),
        ("::1", "::1/128", None),
        ("10.0.0.1", "0.0.0.0/0", None),
        ("fd00::1", "0.0.0.0/0", "private"),
    ],
)
def test_what_an_allow_list_opens(host, allowed, expected):
    """C7: an allowed embedding network allows addresses whose embedded address is allowed."""
    assert refusal(host, parse_networks(allowed.split(","))) == expected


@pytest.mark.parametrize(
    "text", ["", "localhost", "10.0.0.1/8", "10.0.0.0/33", "fe80::%eth0/10", "10.0.0.0-10.0.0.9"]
)
def test_what_is_no_network_is_refused(text):
    """C7: an ambiguous allow-list is refused at start-up, with the text in question."""
    with pytest.raises(ValueError, match=re.escape(text or "''")):
        parse_networks(["10.0.0.0/8", text])
