"""Host headers that a server answers."""

from __future__ import annotations

import pytest

from penstock.core.hosts import HostPolicy, hosts_fault

LOOPBACK = [
    "localhost",
    "LOCALHOST:8420",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.8.0.1",
    "[::1]:8420",
    "[::1]",
]
ADDRESSES = ["10.1.2.3:9100", "192.168.0.7", "203.0.113.9:80", "[2001:db8::7]:9100", "[fd00::1]"]
# What a page of another site, or a mistake, can put into the header.
FOREIGN = [
    "evil.example",
    "evil.example:8420",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.localhost",
    "gateway.evil.example",
    "xgateway",
    "gateway",
    # Other forms of addresses, which no browser sends, are not read as addresses.
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "127.0.0.01",
    "::1",
    "[::1%25lo]",
    "[fe80::1%lo]",
    "[127.0.0.1]",
    "0.0.0.0",
    "[::]",
]
MALFORMED = ["", ":8420", "localhost:", "localhost:http", "localhost:99999", "user@localhost", "localhost/", "a b",
             "localhost,evil.example", "[::1", "[]", "local\u212aost", "localhost:\uff18\uff14"]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_server_answers_to_loopback_names(host: str) -> None:
    """O5: the names of this machine reach a server on loopback and one on the network."""
    assert HostPolicy.of("127.0.0.1", ()).allows(host)
    assert HostPolicy.of("0.0.0.0", ()).allows(host)


@pytest.mark.parametrize("host", ADDRESSES)
def test_only_a_server_on_the_network_answers_to_other_addresses(host: str) -> None:
    """O5: probes and scrapes name the address of the pod. On loopback no such name leads here."""
    assert not HostPolicy.of("127.0.0.1", ()).allows(host)
    assert not HostPolicy.of("localhost", ()).allows(host)
    assert HostPolicy.of("0.0.0.0", ()).allows(host)
    assert HostPolicy.of("::", ()).allows(host)
    assert HostPolicy.of("10.0.0.5", ()).allows(host)


@pytest.mark.parametrize("host", FOREIGN + MALFORMED)
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
def test_no_server_answers_to_foreign_names(host: str, listens_on: str) -> None:
    """O5: DNS rebinding makes a foreign name lead to this server, and the name stays foreign."""
    assert not HostPolicy.of(listens_on, ()).allows(host)


def test_names_can_be_added() -> None:
    """O5: an added name is exact; `*.` stands for one or more labels. Ports are ignored."""
    policy = HostPolicy.of("127.0.0.1", ("gateway", "*.Apps.example.com", "10.0.0.9", "fd00::9"))
    for allowed in ("gateway", "GATEWAY:80", "gateway.", "a.apps.example.com", "a.b.apps.example.com:443",
                    "10.0.0.9:1", "[fd00::9]", "[fd00:0::9]:80", "localhost"):  # fmt: skip
        assert policy.allows(allowed), allowed
    for refused in (
        "gateway.evil.example",
        "apps.example.com",
        "xapps.example.com",
        "10.0.0.8",
        ".apps.example.com",
    ):
        assert not policy.allows(refused), refused


def test_the_name_that_a_server_listens_on_is_its_own() -> None:
    """O5: a server on a named address answers to that name."""
    assert HostPolicy.of("tasks.internal", ()).allows("tasks.internal:8420")


@pytest.mark.parametrize(
    "name", ["*", "*.", "http://gateway", "gateway:80", "a b", "*.*.example", "a..b", "[::1]", "-a.b"]
)
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    """O5: an entry that could never match, or would match everything, is an error."""
    assert name in str(hosts_fault(("localhost", name)))
    assert hosts_fault(("gateway", "*.apps.example.com", "10.0.0.9", "fd00::9", "svc_1.ns.svc")) is None
