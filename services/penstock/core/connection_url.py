"""The parts of a connection URL that may name several servers. Pure."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

_SERVERS = re.compile("[^/?#]*")


def split_url(url: str) -> SplitResult:
    """Splits a URL as `urlsplit` does, and leaves its servers as they are.

    In newer releases of Python, and in Debian's 3.11.2, `urlsplit` refuses an IPv6 address that
    stands behind another server.

    Raises:
        ValueError: the rest is no URL.
    """
    scheme, _, rest = url.partition("://")
    servers = _SERVERS.match(rest)
    assert servers is not None, "it matches any text"
    return urlsplit(f"{scheme}://{rest[servers.end() :]}")._replace(netloc=servers.group())
