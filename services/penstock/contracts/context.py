"""A task's context: what a stage is given and what it hands on, inline or by reference (claim check).

On the wire three fields of the surrounding record: `content_type` (json, text, url or bytes) and either
`context` (the value; base64 for bytes) or `context_ref` (where the object store keeps it). Results use the
same shape with other field names.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from penstock.errors import InvalidRecord

# T4: a larger context goes to the object store.
INLINE_LIMIT_BYTES = 4096


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
            return cls(ContentType.JSON, orjson.dumps(value))
        except TypeError as error:
            raise InvalidRecord(f"the context is not JSON: {error}", pointer="/context") from error

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

    @property
    def size(self) -> int:
        """Length of the encoded value in bytes."""
        if self.ref is not None:
            return self.ref.size
        data = self.data
        assert data is not None
        return len(data)
