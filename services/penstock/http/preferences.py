"""The request header `Prefer` (RFC 7240)."""

from __future__ import annotations

from aiohttp import web

LONGEST_WAIT_S = 60


def preferred_wait_s(request: web.Request) -> int:
    """The seconds of the preference `wait`, at most `LONGEST_WAIT_S`; 0 without it.

    As the RFC demands, a preference that is unknown or malformed is ignored.
    """
    for header in request.headers.getall("Prefer", []):
        for preference in header.split(","):
            name, _, value = preference.partition(";")[0].partition("=")
            value = value.strip().strip('"')
            if name.strip().lower() == "wait" and value.isascii() and value.isdigit():
                return min(int(value[:9]), LONGEST_WAIT_S)
    return 0


def applied(wait_s: int) -> dict[str, str]:
    """The headers of an answer for which the gateway has waited, or would have."""
    return {"Preference-Applied": f"wait={wait_s}"} if wait_s else {}
