"""URLs of requests to other servers, as the URLs were given.

yarl decodes `%7E`, resolves `/a/../b`, drops an empty `?` and writes lower-case hex in upper case.
Servers that sign or compare the raw URL refuse such a request.
"""

from __future__ import annotations

import re
import string
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

# Options of `aiohttp.ClientSession` for servers that the operator has chosen: proxies and providers
# of identities send longer heads than aiohttp accepts by default.
LARGE_HEADS: dict[str, Any] = {"max_field_size": 64 * 1024, "max_headers": 1000}

_AUTHORITY_END = re.compile(r"[/?#]")
# All of printable ASCII but the blank. A blank or a control character would end the request line.
_SENT_AS_GIVEN = string.digits + string.ascii_letters + string.punctuation


def as_given(url: str) -> URL:
    """The URL for aiohttp, which sends path and query byte for byte.

    Only what a request line cannot have is encoded: blanks, control characters and characters
    beyond ASCII are percent-encoded as UTF-8. The host is encoded as aiohttp does by default. An
    empty path is sent as `/`. A fragment is not sent.

    Raises:
        InvalidURL: it is no URL.
    """
    scheme, authority, target = _parts(url)
    try:
        # The query is a part of the path, because yarl drops an empty query.
        return URL(f"{scheme}://{authority}").with_path(quote(target, safe=_SENT_AS_GIVEN), encoded=True)
    except ValueError as error:
        raise aiohttp.InvalidURL(url) from error


def host_header(url: str) -> dict[str, str]:
    """The header `Host`, with host and port as they were given; aiohttp's own beyond ASCII."""
    _scheme, authority, _target = _parts(url)
    host = authority.rpartition("@")[2]
    return {"Host": host} if host.isascii() else {}


def _parts(url: str) -> tuple[str, str, str]:
    scheme, _, rest = url.partition("://")
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
    return scheme, authority, rest[len(authority) :].partition("#")[0]
