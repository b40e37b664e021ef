"""The object store, by obstore: large contexts (claim check, T4) and the archive of history.

Context objects are named by their digest, so a repeated upload is idempotent. Fails closed: bytes
that do not match their reference never reach a handler. An object is only called missing by a store
that is there: a folder that is not mounted and a deleted bucket are outages.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
import orjson
from obstore.exceptions import BaseError
from obstore.store import from_url

from penstock.contracts.context import (
    CONTEXTS_PREFIX,
    DEPTH_LIMIT,
    INLINE_LIMIT_BYTES,
    ContentType,
    Context,
    ObjectRef,
    too_deep,
)
from penstock.errors import CorruptObject, InvalidRecord, ObjectsUnavailable, SettingsError, TooLarge

_REMEDY = (
    "set PENSTOCK_OBJECTS to file:///FOLDER or s3://BUCKET/PREFIX, the same for every service and worker"
)

# Multipart uploads: S3 accepts no part below 5 MiB.
_CHUNK_BYTES = 5 * 1024 * 1024
_CONCURRENT_PARTS = 2
_READ_BYTES = 1024 * 1024

# A few retries within one call: the callers try again by themselves. By default the library goes on
# for three minutes, in which an outage looks like a slow store.
_RETRIES = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}

# Seconds for an answer to a probe.
PROBE_S = 3.0
# A probe writes as much as the smallest context, because a full disk takes an empty file.
_PROBE = bytes(INLINE_LIMIT_BYTES + 1)
_PROBE_NAME = "probe"
# Amazon's code in the answer of a store without the bucket. The answer is otherwise that of a
# missing object.
_NO_BUCKET = "NoSuchBucket"
_REASON_LENGTH = 300
# The beginning of an error of the library, and the end of one of the operating system.
_LIBRARY_PREFIX = re.compile(r"^Generic \w+ error: ")
_OS_ERROR = re.compile(r"\(os error (\d+)\)$")


class ObjectStore:
    """The object store at a URL.

    Args:
        url: `file:///folder` (created when missing), `s3://bucket/prefix` (credentials as for the
            AWS tools) or `memory:///`.

    Raises:
        SettingsError: the URL is empty, its scheme is unknown, or the folder cannot be created or
            written.
        ObjectsUnavailable: there is something else where the folder was.
    """

    def __init__(self, url: str) -> None:
        if not url:
            # No default: with a local folder a worker could not read contexts that another process
            # stored.
            raise SettingsError(
                f"objects is not set, so large contexts cannot be stored: {_REMEDY}; for a `penstock up` on this "
                "machine, start in its directory or set PENSTOCK_DATA_DIR to its --data-dir instead"
            )
        try:
            parts = urlsplit(url)
            folder = unquote(parts.path) if parts.scheme == "file" else None
            if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
                raise ObjectsUnavailable(f"the object store is away: {folder} is not a folder")
            options: dict[str, Any] = {"mkdir": True} if folder is not None else {"retry_config": _RETRIES}
            self._store = from_url(url, **options)
        except (BaseError, ValueError, OSError) as error:
            raise SettingsError(
                f"PENSTOCK_OBJECTS={url!r} is not an object store ({_reason(error)}): {_REMEDY}"
            ) from error
        self._folder = folder
        # Without a user or parameters, which could be credentials.
        self._name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if self._folder is not None and not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise SettingsError(
                f"PENSTOCK_OBJECTS={url!r} cannot be read and written by this user: {_REMEDY}"
            )

    async def check_in(self, context: Context, namespace: str) -> Context:
        """Stores a context above the inline limit and returns its reference; others are unchanged.

        Args:
            context: of a task, or its result.
            namespace: of the task.

        Raises:
            ObjectsUnavailable: the object is not stored.
        """
        if context.data is None or len(context.data) <= INLINE_LIMIT_BYTES:
            return context
        ref = ObjectRef.of(context.data, namespace)
        # Without the check, the library would create a folder where another one was mounted.
        self._require_folder()
        with self._failing(f"does not store {len(context.data):,} bytes"):
            await obstore.put_async(self._store, ref.key, context.data)
        return Context(context.content_type, ref=ref)

    async def check_out(self, context: Context, namespace: str, *, limit_bytes: int | None = None) -> Context:
        """Fetches the object of a reference; returns an inline context unchanged.

        A reference can come from any worker, so nothing is read before its key and its size are
        those of a context, and never more than its size. No error tells what another object has.

        Args:
            context: inline, or a reference.
            namespace: of the task.
            limit_bytes: the largest object that this process holds in memory; None is any.

        Raises:
            CorruptObject: the object does not exist, differs from its reference, or the reference
                is no context's.
            TooLarge: the object is larger than `limit_bytes`.
            ObjectsUnavailable: the store does not answer, or refuses this object.
        """
        ref = context.ref
        if ref is None:
            return context
        try:
            ref.require_own_key()
            ref.require_namespace(namespace)
        except InvalidRecord as fault:
            raise CorruptObject(fault.reason) from fault
        if limit_bytes is not None and ref.size > limit_bytes:
            raise TooLarge(
                f"the object of the context has {ref.size:,} bytes; {limit_bytes:,} is the limit here: "
                "read it from the object store"
            )
        data = await self._read_exactly(ref)
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptObject(f"the digest of object {ref.key} differs from its reference")
        return _typed(context.content_type, data, ref.key)

    async def _read_exactly(self, ref: ObjectRef) -> bytes:
        data = bytearray()
        try:
            response = await obstore.get_async(self._store, ref.key)
            # The size is known before the object is read.
            if response.meta["size"] == ref.size:
                async for chunk in response.stream(min_chunk_size=_READ_BYTES):
                    data += bytes(chunk)
                    if len(data) > ref.size:
                        break
                if len(data) == ref.size:
                    return bytes(data)
        except FileNotFoundError as error:
            self._require_folder(CONTEXTS_PREFIX)
            if _NO_BUCKET in str(error):
                raise self._unavailable("has no such bucket", error) from error
            raise CorruptObject(f"object {ref.key} is not in the store") from error
        except (BaseError, OSError) as error:
            raise self._unavailable(f"does not return {ref.key}", error) from error
        raise CorruptObject(f"object {ref.key} does not have the {ref.size:,} bytes of its reference")

    async def answers(self) -> bool:
        """Whether the store takes objects at all: then an error is that of a single object."""
        try:
            await self.probe()
        except ObjectsUnavailable:
            return False
        return True

    async def probe(self) -> None:
        """Returns when the store has taken an object, because one that is full still answers reads.

        Raises:
            ObjectsUnavailable: it has not, within `PROBE_S` seconds.
        """
        self._require_folder()
        try:
            async with asyncio.timeout(PROBE_S):
                with self._failing("cannot be written"):
                    await obstore.put_async(self._store, self._probe_key(), _PROBE)
        except TimeoutError as error:
            raise ObjectsUnavailable(
                f"the object store {self._name} does not answer within {PROBE_S:g} s"
            ) from error

    def _probe_key(self) -> str:
        """The key of the probe: a context's, as far as rights and deletion by age go.

        In a folder without contexts it is another one. The folder may be an empty one where the
        store is not mounted, and `_read_exactly` must not find the folder of contexts there.
        """
        if self._folder is not None and not (Path(self._folder) / CONTEXTS_PREFIX).exists():
            return _PROBE_NAME
        return f"{CONTEXTS_PREFIX}{_PROBE_NAME}"

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Raises an error of the library in the block as `ObjectsUnavailable`."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._unavailable(what, error) from error

    def _unavailable(self, what: str, error: Exception) -> ObjectsUnavailable:
        if _NO_BUCKET in str(error):
            what = "has no such bucket"
        return ObjectsUnavailable(f"the object store {self._name} {what}: {_reason(error)}")

    def _require_folder(self, part: str = "") -> None:
        """Checks that a part of a local store exists.

        Raises:
            ObjectsUnavailable: it does not: the folder is not mounted, or was replaced.
        """
        if self._folder is not None and not (path := Path(self._folder) / part).is_dir():
            raise ObjectsUnavailable(f"the object store is away: {path} is not a folder")

    async def put_chunks(self, object_key: str, chunks: AsyncIterator[bytes]) -> None:
        """Stores an object from chunks, atomically: an error leaves the old object or none.

        Raises:
            ObjectsUnavailable: the object is not stored.
            Exception: any exception of `chunks`.
        """
        self._require_folder()
        with self._failing(f"does not store {object_key}"):
            await obstore.put_async(
                self._store, object_key, chunks, chunk_size=_CHUNK_BYTES, max_concurrency=_CONCURRENT_PARTS
            )

    async def chunks(self, object_key: str) -> AsyncIterator[bytes]:
        """Reads an object in chunks.

        Raises:
            CorruptObject: the object does not exist.
            ObjectsUnavailable: the store does not answer.
        """
        with self._failing(f"does not return {object_key}"):
            try:
                response = await obstore.get_async(self._store, object_key)
                async for chunk in response.stream(min_chunk_size=_READ_BYTES):
                    yield bytes(chunk)
            except FileNotFoundError as error:
                raise CorruptObject(f"object {object_key} is not in the store") from error

    async def put(self, object_key: str, data: bytes) -> None:
        """Stores an object.

        Raises:
            ObjectsUnavailable: it is not stored.
        """
        self._require_folder()
        with self._failing(f"does not store {object_key}"):
            await obstore.put_async(self._store, object_key, data)

    async def range(self, object_key: str, begin: int, length: int) -> bytes:
        """The bytes of an object from `begin` on.

        Raises:
            CorruptObject: the object does not exist, or is shorter.
            ObjectsUnavailable: the store does not answer.
        """
        with self._failing(f"does not return {object_key}"):
            try:
                data = await obstore.get_range_async(self._store, object_key, start=begin, length=length)
            except FileNotFoundError as error:
                self._require_folder()
                raise CorruptObject(f"object {object_key} is not in the store") from error
        if len(data) != length:
            raise CorruptObject(f"object {object_key} ends before byte {begin + length:,}")
        return bytes(data)

    async def delete(self, object_keys: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are no error.

        Raises:
            ObjectsUnavailable: some may still be there.
        """
        self._require_folder()
        for object_key in object_keys:
            with self._failing(f"does not delete {object_key}"), suppress(FileNotFoundError):
                await obstore.delete_async(self._store, object_key)

    async def folders(self, prefix: str) -> list[str]:
        """The folders directly below a prefix, as prefixes without a slash at the end.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        self._require_folder()
        with self._failing(f"does not list {prefix}"):
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        return [str(each).rstrip("/") for each in found["common_prefixes"]]

    async def pages(self, prefix: str) -> AsyncIterator[list[tuple[str, datetime]]]:
        """The keys below a prefix, and when each was stored, some at a time.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        self._require_folder()
        with self._failing(f"does not list {prefix}"):
            async for page in obstore.list(self._store, prefix):
                yield [(str(each["path"]), each["last_modified"]) for each in page]

    async def size_of(self, object_key: str) -> int | None:
        """Returns the size of an object in bytes; None when it does not exist.

        Raises:
            ObjectsUnavailable: the store does not answer.
        """
        with self._failing(f"does not tell the size of {object_key}"), suppress(FileNotFoundError):
            return int((await obstore.head_async(self._store, object_key))["size"])
        return None


def _reason(error: Exception) -> str:
    """The fault that an error of the library tells, without the library's internals."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    line = _LIBRARY_PREFIX.sub("", line)
    # The rest of a local store's text names temporary files.
    local = _OS_ERROR.search(line)
    return os.strerror(int(local[1])) if local else line[:_REASON_LENGTH]


def _typed(content_type: ContentType, data: bytes, object_key: str) -> Context:
    """The context of an object's bytes, which are what the content type says.

    The bytes of a JSON value are copied into answers. Unread, they could end the value there and
    begin the next one.

    Raises:
        CorruptObject: they are something else.
    """
    try:
        if content_type is ContentType.JSON:
            value = orjson.loads(data)
            if too_deep(data, value):
                raise CorruptObject(f"object {object_key} is nested deeper than {DEPTH_LIMIT} levels")
            return Context(content_type, data, value=value)
        if content_type is not ContentType.BYTES:
            data.decode()
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"object {object_key} is not {content_type.value}: {error}") from error
    return Context(content_type, data)
