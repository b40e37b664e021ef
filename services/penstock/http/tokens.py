"""The header by which a client says who it is."""

from __future__ import annotations

import re

from penstock.errors import SettingsError

# RFC 6750: what a bearer token may consist of.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


def bearer(token: str | None) -> dict[str, str]:
    """The header with an API key or token; none without one.

    Raises:
        SettingsError: no such token can be sent. Does not quote it.
    """
    text = (token or "").strip()
    if not text:
        return {}
    if not _TOKEN.fullmatch(text):
        raise SettingsError(
            "api_key is no API key or bearer token: set PENSTOCK_API_KEY to what `penstock keys` showed"
        )
    return {"Authorization": f"Bearer {text}"}
