"""The parts of `Client` share this: requests to the gateway, their parameters, and pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock.errors import InvalidRecord, SettingsError

DEFAULT_URL = "http://127.0.0.1:8420"

Document = Mapping[str, Any]
# (name, value) of query parameters.
Query = Sequence[tuple[str, str]]


class Transport(Protocol):
    """Sends requests to the gateway; `Client` implements it, and the mixins of `Client` use it."""

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: Query = (),
        safe: bool = True,
        wait_s: int = 0,
    ) -> dict[str, Any]: ...


def require_positive(rate: float | None) -> float | None:
    """The rate, or None.

    Raises:
        InvalidRecord: the rate is not above 0, or not finite. JSON would turn an infinite rate into
            null, which means no rate.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRecord(f"{rate} is not a number above 0", pointer="/rate")
    return rate


def query_of(**filters: object) -> list[tuple[str, str]]:
    """Query parameters from the filters that are not None."""
    return [(name, str(value)) for name, value in filters.items() if value is not None]


def without_none(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


async def pages(
    transport: Transport, path: str, field: str, query: Query, limit: int | None, page_size: int
) -> AsyncIterator[Document]:
    """The documents of all pages.

    Args:
        transport: sends the requests.
        path: path of the list.
        field: field of the answer that has the documents.
        query: filters.
        limit: most documents to yield; None is all.
        page_size: most documents of a page.
    """
    remaining = limit
    cursor: list[tuple[str, str]] = []
    while remaining is None or remaining > 0:
        size = page_size if remaining is None else min(remaining, page_size)
        page = await transport._request("GET", path, query=[*query, *cursor, ("limit", str(size))])  # noqa: SLF001 (the protocol's own method)
        for document in page[field]:
            yield document
        if remaining is not None:
            remaining -= len(page[field])
        if page["next"] is None:
            return
        cursor = [("cursor", page["next"])]


def base_url(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        SettingsError: the address is no http:// or https:// URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise SettingsError(
            f"gateway={url!r} is not a URL: set PENSTOCK_GATEWAY (or --gateway) to http://HOST:PORT, "
            f"such as {DEFAULT_URL}"
        )
    return url.rstrip("/")
