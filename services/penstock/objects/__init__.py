"""The claim check (T4): contexts above the inline limit live in an object store, by obstore; and so does the archive.

Objects are named after their content, so storing one twice is storing it once and a retry is harmless.
In doubt it refuses: bytes that do not match their reference are never handed to a handler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from penstock.contracts.context import INLINE_LIMIT_BYTES, Context, ObjectRef
from penstock.errors import CorruptObject, ObjectsUnavailable, SettingsError

_REMEDY = (
    "set PENSTOCK_OBJECTS to file:///FOLDER or s3://BUCKET/PREFIX, the same for every service and worker"
)

# Of an object that is stored piece by piece: the size of a piece (S3 takes none below 5 MiB), and how many are under way.
_CHUNK_BYTES = 5 * 1024 * 1024
_AT_A_TIME = 2
_READ_BYTES = 1024 * 1024


class ObjectStore:
    """One store, named by URL.

    Args:
        url: `file:///folder` (made when missing), `s3://bucket/prefix` (credentials as the AWS tools take them)
            or `memory:///`.

    Raises:
        SettingsError: none is named, no such kind of store, or a folder that cannot be made or written.
    """

    def __init__(self, url: str) -> None:
        if not url:
            # No default: a folder of its own would serve a worker until the first context that another has stored.
            raise SettingsError(
                f"objects is not set, so large contexts have no place: {_REMEDY}; for a `penstock up` on this "
                "machine, start in its directory or set PENSTOCK_DATA_DIR to its --data-dir instead"
            )
        try:
            parts = urlsplit(url)
            options: dict[str, Any] = {"mkdir": True} if parts.scheme == "file" else {}
            self._store = from_url(url, **options)
        except (BaseError, ValueError, OSError) as error:
            # The first line: after it some errors show the innards of the library.
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise SettingsError(f"objects={url!r} is not an object store ({why}): {_REMEDY}") from error
        if parts.scheme == "file" and not os.access(unquote(parts.path), os.R_OK | os.W_OK | os.X_OK):
            raise SettingsError(f"objects={url!r} may not be read and written by this user: {_REMEDY}")

    async def check_in(self, context: Context) -> Context:
        """Stores a context above the inline limit and returns one that refers to it; a small one as it is.

        Raises:
            ObjectsUnavailable: it is not stored.
        """
        if context.data is None or len(context.data) <= INLINE_LIMIT_BYTES:
            return context
        digest = hashlib.sha256(context.data).hexdigest()
        key = f"contexts/{digest[:2]}/{digest}"
        try:
            await obstore.put_async(self._store, key, context.data)
        except BaseError as error:
            raise ObjectsUnavailable(f"could not store {len(context.data):,} bytes: {error}") from error
        return Context(context.content_type, ref=ObjectRef(key, digest, len(context.data)))

    async def check_out(self, context: Context) -> Context:
        """Fetches what a context refers to; an inline one as it is.

        Raises:
            CorruptObject: the object is gone, or its bytes are not those that were checked in.
            ObjectsUnavailable: the store does not answer.
        """
        ref = context.ref
        if ref is None:
            return context
        try:
            got = await obstore.get_async(self._store, ref.key)
            data = bytes(await got.bytes_async())
        except FileNotFoundError as error:
            raise CorruptObject(f"object {ref.key} is not in the store") from error
        except BaseError as error:
            raise ObjectsUnavailable(f"could not fetch {ref.key}: {error}") from error
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptObject(f"object {ref.key} has {len(data):,} bytes that are not those checked in")
        return Context(context.content_type, data=data)

    async def put_chunks(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Stores an object that is made piece by piece: whole when it returns, and else as it was before.

        Raises:
            ObjectsUnavailable: it is not stored.
            Exception: whatever `chunks` raises.
        """
        try:
            await obstore.put_async(
                self._store, key, chunks, chunk_size=_CHUNK_BYTES, max_concurrency=_AT_A_TIME
            )
        except (BaseError, OSError) as error:
            raise ObjectsUnavailable(f"could not store {key}: {error}") from error

    async def chunks(self, key: str) -> AsyncIterator[bytes]:
        """The bytes of an object, piece by piece.

        Raises:
            CorruptObject: it is gone.
            ObjectsUnavailable: the store does not answer.
        """
        try:
            got = await obstore.get_async(self._store, key)
            async for chunk in got.stream(min_chunk_size=_READ_BYTES):
                yield bytes(chunk)
        except FileNotFoundError as error:
            raise CorruptObject(f"object {key} is not in the store") from error
        except (BaseError, OSError) as error:
            raise ObjectsUnavailable(f"could not fetch {key}: {error}") from error

    async def size_of(self, key: str) -> int | None:
        """How many bytes an object has; None when it is not there.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        try:
            return int((await obstore.head_async(self._store, key))["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise ObjectsUnavailable(f"could not look at {key}: {error}") from error
