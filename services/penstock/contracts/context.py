"""A task's context: what a stage is given and what it hands on, inline or by reference (claim check).

On the wire three fields of the surrounding record: `content_type` (json, text, url or bytes) and either
`context` (the value; base64 for bytes) or `context_ref` (where the object store keeps it). Results use the
same shape with other field names.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from penstock.errors import InvalidRecord

# T4: a larger context goes to the object store.
INLINE_LIMIT_BYTES = 4096
# Levels of arrays and objects in a value. What reads JSON here takes 1,024, what writes it 254, and a context must
# fit into records and events around it.
DEPTH_LIMIT = 200
_ORJSON_DEPTH = 254


class ContentType(StrEnum):
    """What kind of value a context is."""

    JSON = "json"
    TEXT = "text"
    URL = "url"
    BYTES = "bytes"


_CONTENT_TYPES = {member.value: member for member in ContentType}


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Where a large context is kept.

    Attributes:
        key: path below the object store's root.
        sha256: digest of the bytes, lower-case hexadecimal.
        size: length in bytes.
    """

    key: str
    sha256: str
    size: int

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `context_ref`."""
        return {"key": self.key, "sha256": self.sha256, "size": self.size}

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> ObjectRef:
        """Reads a `context_ref` that its schema has let through."""
        return cls(raw["key"], raw["sha256"], raw["size"])


def too_deep(data: bytes, value: Any) -> bool:
    """Whether a JSON value is nested deeper than `DEPTH_LIMIT`.

    Args:
        data: its encoded bytes: when they are few, or few of them are brackets, it cannot be.
        value: what was read from them.
    """
    if len(data) <= 2 * DEPTH_LIMIT or data.count(b"[") + data.count(b"{") <= DEPTH_LIMIT:
        return False
    for _ in range(_ORJSON_DEPTH - DEPTH_LIMIT):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def _not_finite(value: Any) -> float | None:
    """A number in `value` that JSON does not have; None when there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return None
    return next((found for item in value if (found := _not_finite(item)) is not None), None)


_UNREAD: Any = object()


class Context:
    """Encoded bytes with their type, or a reference to them.

    A JSON value that has just been read from a record is encoded only when its bytes are asked for, and bytes
    are decoded only when the value is: at the rate of stages most contexts need one of the two.

    Attributes:
        content_type: what kind of value it is.
        ref: where it is kept, when it is not inline.
    """

    __slots__ = ("_data", "_value", "content_type", "ref")

    def __init__(
        self,
        content_type: ContentType,
        data: bytes | None = None,
        ref: ObjectRef | None = None,
        *,
        value: Any = _UNREAD,
    ) -> None:
        self.content_type = content_type
        self.ref = ref
        self._data = data
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return (self.content_type, self.ref, self.data) == (other.content_type, other.ref, other.data)

    def __hash__(self) -> int:
        return hash((self.content_type, self.ref, self.data))

    def __repr__(self) -> str:
        return f"Context({self.content_type.value}, {self.ref or self.data!r})"

    @property
    def data(self) -> bytes | None:
        """The encoded value; None with a reference."""
        if self._data is None and self._value is not _UNREAD:
            self._data = orjson.dumps(self._value)
        return self._data

    @classmethod
    def encode(cls, value: Any) -> Context:
        """The context of a Python value: bytes stay bytes, everything else becomes JSON.

        Text and URLs are JSON strings unless wrapped by hand: `Context(ContentType.TEXT, b"...")`.

        Raises:
            InvalidRecord: JSON has no such value.
        """
        if isinstance(value, Context):
            return value
        if isinstance(value, bytes | bytearray):
            return cls(ContentType.BYTES, bytes(value))
        try:
            data = orjson.dumps(value)
        except TypeError as error:
            raise InvalidRecord(f"the context is not JSON: {error}", pointer="/context") from error
        # orjson writes null for these, silently.
        if b"null" in data and (number := _not_finite(value)) is not None:
            raise InvalidRecord(f"the context is not JSON: {number} is not JSON", pointer="/context")
        if too_deep(data, value):
            raise InvalidRecord(f"the context is nested deeper than {DEPTH_LIMIT} levels", pointer="/context")
        return cls(ContentType.JSON, data)

    def decode(self) -> Any:
        """The Python value: any JSON, `str` for text and URL, `bytes` for bytes. Only for inline contexts."""
        if self._value is not _UNREAD:
            return self._value
        data = self._data
        assert data is not None, "resolve the reference through penstock.objects first"
        if self.content_type is ContentType.JSON:
            return orjson.loads(data)
        return data if self.content_type is ContentType.BYTES else data.decode()

    def to_wire(self, name: str = "context") -> dict[str, Any]:
        """The record's fields: `content_type` with `<name>` or `<name>_ref`."""
        if self.ref is not None:
            return {"content_type": self.content_type.value, f"{name}_ref": self.ref.to_wire()}
        if self.content_type is ContentType.JSON and self._data is None:
            return {"content_type": "json", name: self._value}
        assert self._data is not None
        return {"content_type": self.content_type.value, name: self._wire_value(self._data)}

    def _wire_value(self, data: bytes) -> Any:
        if self.content_type is ContentType.JSON:
            return orjson.Fragment(data)
        if self.content_type is ContentType.BYTES:
            return base64.b64encode(data).decode("ascii")
        return data.decode()

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any], name: str = "context", pointer: str = "") -> Context | None:
        """Reads a record's fields; None when neither `<name>` nor `<name>_ref` is there.

        Raises:
            InvalidRecord: value and content type contradict each other.
        """
        content_type = _CONTENT_TYPES[raw.get("content_type", "json")]
        reference = raw.get(f"{name}_ref")
        if reference is not None:
            return cls(content_type, ref=ObjectRef.from_wire(reference))
        if name not in raw:
            return None
        value = raw[name]
        if content_type is ContentType.JSON:
            return cls(content_type, value=value)
        if not isinstance(value, str):
            raise InvalidRecord(
                f"with content_type {content_type.value} this must be a string", pointer=f"{pointer}/{name}"
            )
        if content_type is ContentType.BYTES:
            try:
                return cls(content_type, base64.b64decode(value, validate=True))
            except (binascii.Error, ValueError) as error:
                raise InvalidRecord(f"not base64: {error}", pointer=f"{pointer}/{name}") from error
        if content_type is ContentType.URL and "://" not in value:
            raise InvalidRecord("not an absolute URL (scheme://…)", pointer=f"{pointer}/{name}")
        return cls(content_type, value.encode())

    def require_shallow(self, pointer: str = "/context") -> None:
        """Makes sure that an inline value can be written again wherever it has to go.

        Raises:
            InvalidRecord: it is nested deeper than `DEPTH_LIMIT`.
        """
        if self.content_type is not ContentType.JSON or self._value is _UNREAD:
            return
        try:
            data = self.data
        except TypeError as error:  # read, so there is nothing else that could not be written
            raise InvalidRecord(f"nested deeper than {DEPTH_LIMIT} levels", pointer=pointer) from error
        if data is not None and too_deep(data, self._value):
            raise InvalidRecord(f"nested deeper than {DEPTH_LIMIT} levels", pointer=pointer)

    @property
    def size(self) -> int:
        """Length of the encoded value in bytes."""
        if self.ref is not None:
            return self.ref.size
        data = self.data
        assert data is not None
        return len(data)
