"""Serves the files of the console (`services/console`), which has no data of its own.

What this module guarantees: only files of the built console are served, from memory, and with a
policy by which a browser runs and loads nothing else. A gateway without a built console answers
404 and how to build it; everything else works.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web

from penstock.errors import NotFound

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# The names of these files have a digest of their content.
_ASSETS = "assets/"
_FOR_EVER = "public, max-age=31536000, immutable"
_INDEX = "index.html"
# Files below this size gain nothing from compression.
_COMPRESSED_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """One file of the console.

    Attributes:
        body: its bytes.
        compressed: its bytes with gzip; None if that gains nothing.
        content_type: of the file.
        etag: digest of its content, quoted.
    """

    body: bytes
    compressed: bytes | None
    content_type: str
    etag: str


def console_folder() -> Path | None:
    """The folder of the built console; None without one.

    In a wheel it is beside this module, in a repository it is `services/console/dist`.
    """
    here = Path(__file__).parent
    for folder in (here / "console_files", here.parents[1] / "console" / "dist"):
        if (folder / _INDEX).is_file():
            return folder
    return None


@cache
def console_files(folder: Path) -> dict[str, ConsoleFile]:
    """The files of a built console by their path below `folder`."""
    return {
        file.relative_to(folder).as_posix(): _loaded(file) for file in folder.rglob("*") if file.is_file()
    }


def _loaded(file: Path) -> ConsoleFile:
    body = file.read_bytes()
    compressed = gzip.compress(body, mtime=0) if len(body) >= _COMPRESSED_BYTES else None
    if compressed is not None and len(compressed) >= len(body):
        compressed = None
    content_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    digest = hashlib.sha256(body).hexdigest()[:32]
    return ConsoleFile(body, compressed, content_type, f'"{digest}"')


class ConsoleRoutes:
    """The routes of the console's files.

    Args:
        folder: of the built console; None without one.
    """

    def __init__(self, folder: Path | None) -> None:
        self._files = {} if folder is None else console_files(folder)
        if folder is None:
            log.info("There is no built console", extra={"event": "console_missing"})

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.get("/console", self.file), web.get("/console/{path:.*}", self.file)]

    async def file(self, request: web.Request) -> web.Response:
        """GET /console/{path}: a file, or the page of the console for the path of a screen."""
        path = request.match_info.get("path", "")
        found = self._files.get(path)
        if found is None and not path.startswith(_ASSETS):
            path, found = _INDEX, self._files.get(_INDEX)
        if found is None:
            raise NotFound(
                "this file is of another version of the console: reload the page"
                if self._files
                else "this gateway has no console: run `make console`, or install a released wheel"
            )
        headers = {
            "Content-Security-Policy": POLICY,
            "Cache-Control": _FOR_EVER if path.startswith(_ASSETS) else "no-cache",
            "ETag": found.etag,
            "Vary": "Accept-Encoding",
        }
        if request.headers.get("If-None-Match") == found.etag:
            return web.Response(status=304, headers=headers)
        body = found.body
        if found.compressed is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
            body = found.compressed
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type=found.content_type, headers=headers)
