"""The tokens of attempts in reports: a header of records that workers write.

A header, because services of 0.1.0 refuse a value with a member that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidRecord

HEADER = "penstock-tokens"

# A record has at most 10,000 attempts, so more is not read.
_MAX_BYTES = 1_000_000


def headers_of_tokens(tokens: Iterable[str | None]) -> list[tuple[str, bytes]]:
    """The headers of a record with these tokens, in any order; none without tokens."""
    value = ",".join(dict.fromkeys(token for token in tokens if token is not None))
    return [(HEADER, value.encode())] if value else []


def decode_tokens(value: bytes | None) -> frozenset[str]:
    """The tokens of a header; none of a header that is missing or too large."""
    if value is None or len(value) > _MAX_BYTES:
        return frozenset()
    return frozenset(value.decode(errors="replace").split(","))


def unproven_report() -> InvalidRecord:
    """The fault of a report without the token of its attempt."""
    return InvalidRecord(f"the header {HEADER} lacks the token of this attempt's ready record")
