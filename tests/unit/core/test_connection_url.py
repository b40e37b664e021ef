"""A URL of several servers is split alike by every Python."""

from __future__ import annotations

import pytest

from penstock.core.connection_url import split_url
from penstock.settings import with_password


@pytest.mark.parametrize(
    ("url", "servers", "query"),
    [
        ("postgresql://me:a%40b@db1,[::1]:5433,db3/shop?a=1", "me:a%40b@db1,[::1]:5433,db3", "a=1"),
        ("postgresql://[::1]:5433,[::2]/shop", "[::1]:5433,[::2]", ""),
        ("postgresql://db1,[::1]?a=1", "db1,[::1]", "a=1"),
        ("postgresql:///shop?host=a,b", "", "host=a,b"),
        ("postgresql://[broken/shop", "[broken", ""),
    ],
)
def test_servers_stay_as_they_are(url: str, servers: str, query: str) -> None:
    """S11: also IPv6 addresses behind another server, which some versions of Python refuse."""
    parts = split_url(url)
    assert (parts.scheme, parts.netloc, parts.query) == ("postgresql", servers, query)


def test_a_password_is_added_to_a_url_of_ipv6_servers() -> None:
    """S11: and not left out, with an error of the server that names another cause."""
    assert (
        with_password("postgresql://me@db1,[::1]/shop", "s/t")
        == "postgresql://me@db1,[::1]/shop?password=s%2Ft"
    )
    assert with_password("postgresql://me:x@db1,[::1]/shop", "s") == "postgresql://me:x@db1,[::1]/shop"
