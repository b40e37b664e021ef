"""Keyset pagination: page sizes, pages and cursors of all routes that list rows.

A route reads one row more than a page has. When there is one more, `next` of the answer is the
cursor of the page's last row, and the client sends it as `cursor` to get the next page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiohttp import web

from penstock.http.server import MAX_ID, integer_parameter, respond

PAGE_SIZE = 50
MAX_PAGE_SIZE = 500

Row = TypeVar("Row")


def page_size(request: web.Request, *, default: int = PAGE_SIZE, largest: int = MAX_PAGE_SIZE) -> int:
    """The number of rows that a request asks for by `limit`.

    Raises:
        BadParameter: it is not an integer from 1 to `largest`.
    """
    return integer_parameter(request, "limit", default, low=1, high=largest)


def id_cursor(request: web.Request) -> int | None:
    """The `cursor` of a route whose cursors are ids; None for the first page.

    Raises:
        BadParameter: it is not an id.
    """
    return integer_parameter(request, "cursor", 0, low=1, high=MAX_ID) or None


def respond_page(
    name: str,
    rows: Sequence[Row],
    size: int,
    cursor_of: Callable[[Row], str],
    document: Callable[[Row], Any],
) -> web.Response:
    """Answers a page: the documents of its rows as `name`, and its `next`. See `split_page`."""
    page, next_cursor = split_page(rows, size, cursor_of)
    return respond({name: [document(row) for row in page], "next": next_cursor})


def split_page(
    rows: Sequence[Row], size: int, cursor_of: Callable[[Row], str]
) -> tuple[Sequence[Row], str | None]:
    """The rows of a page, and its `next`: the cursor of the next page, or None on the last page.

    Args:
        rows: up to `size + 1` rows.
        size: rows of a page.
        cursor_of: the cursor behind a row.
    """
    page = rows[:size]
    return page, cursor_of(page[-1]) if len(rows) > size else None
