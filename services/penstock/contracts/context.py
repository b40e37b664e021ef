"""The context of a task, which is the input of its stage: inline, or by reference (claim check).

On the wire a context is two fields of its record: `content_type` (json, text, url or bytes), and
either `context` (the value, in base64 for bytes) or `context_ref` (its place in the object store).
Results use the same form with other field names.
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

# T4: larger contexts go to the object store.
INLINE_LIMIT_BYTES = 4096
# Most levels of arrays and objects in a value. orjson reads 1,024 levels but writes only 254, and
# records and events put further levels around a context.
DEPTH_LIMIT = 200
_ORJSON_DEPTH = 254


class ContentType(StrEnum):
    """The kind of a context's value."""

    JSON = "json"
    TEXT = "text"
    URL = "url"
    BYTES = "bytes"


_CONTENT_TYPES = {member.value: member for member in ContentType}


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The place of a large context in the object store.

    Attributes:
        key: path below the root of the object store.
        sha256: digest of the bytes, in lower-case hexadecimal digits.
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
        """Reads a `context_ref` that conforms to its schema."""
        return cls(raw["key"], raw["sha256"], raw["size"])


def too_deep(data: bytes, value: Any) -> bool:
    """Whether a JSON value is nested deeper than `DEPTH_LIMIT`.

    Args:
        data: the encoded value. Short values, and values with few brackets, need no further check.
        value: the decoded value.
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
    """A number in `value` that JSON cannot express (infinity or NaN); None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return None
    return next((found for item in value if (found := _not_finite(item)) is not None), None)


_NO_VALUE: Any = object()


class Context:
    """An encoded value with its type, or a reference to it.

    A JSON value is encoded, and bytes are decoded, only on demand. Most contexts pass a process in
    one form only, and both conversions are costly at the rate of stages.

    Attributes:
        content_type: kind of the value.
        ref: place in the object store; None for an inline context.
    """

    __slots__ = ("_data", "_value", "content_type", "ref")

    def __init__(
        self,
        content_type: ContentType,
        data: bytes | None = None,
        ref: ObjectRef | None = None,
        *,
        value: Any = _NO_VALUE,
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
        """The encoded value; None for a reference."""
        if self._data is None and self._value is not _NO_VALUE:
            self._data = orjson.dumps(self._value)
        return self._data

    @classmethod
    def encode(cls, value: Any) -> Context:
        """The context of a Python value: bytes stay bytes, and any other value becomes JSON.

        Text and URLs become JSON strings. For another content type pass a context:
        `Context(ContentType.TEXT, b"...")`.

        Raises:
            InvalidRecord: JSON cannot express the value.
        """
        if isinstance(value, Context):
            return value
        if isinstance(value, bytes | bytearray):
            return cls(ContentType.BYTES, bytes(value))
        try:
            data = orjson.dumps(value)
        except TypeError as error:
            raise InvalidRecord(
                f"the context is not JSON: {error}; pass JSON values or bytes", pointer="/context"
            ) from error
        # orjson writes infinity and NaN as null, without an error.
        if b"null" in data and (number := _not_finite(value)) is not None:
            raise InvalidRecord(
                f"the context is not JSON: {number} is not JSON; pass null or a string instead",
                pointer="/context",
            )
        if too_deep(data, value):
            raise InvalidRecord(
                f"the context is nested deeper than {DEPTH_LIMIT} levels: flatten it, or send it as text",
                pointer="/context",
            )
        return cls(ContentType.JSON, data)

    def decode(self) -> Any:
        """The value of an inline context: any JSON value, `str` for text and URL, or `bytes`."""
        if self._value is not _NO_VALUE:
            return self._value
        data = self._data
        assert data is not None, "resolve the reference through penstock.objects first"
        if self.content_type is ContentType.JSON:
            return orjson.loads(data)
        return data if self.content_type is ContentType.BYTES else data.decode()

    def to_wire(self, name: str = "context") -> dict[str, Any]:
        """The fields of the record: `content_type`, and `<name>` or `<name>_ref`."""
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
        """Reads the fields of a record; None without `<name>` and `<name>_ref`.

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
                f"a value with content_type {content_type.value} must be a string",
                pointer=f"{pointer}/{name}",
            )
        if content_type is ContentType.BYTES:
            try:
                return cls(content_type, base64.b64decode(value, validate=True))
            except (binascii.Error, ValueError) as error:
                raise InvalidRecord(
                    f"not base64: {error}; encode the bytes as base64", pointer=f"{pointer}/{name}"
                ) from error
        if content_type is ContentType.URL and "://" not in value:
            raise InvalidRecord(
                "not an absolute URL: send scheme://… or another content_type", pointer=f"{pointer}/{name}"
            )
        return cls(content_type, value.encode())

    def require_shallow(self, pointer: str = "/context") -> None:
        """Requires an inline value that records and events can carry.

        Raises:
            InvalidRecord: the value is nested deeper than `DEPTH_LIMIT`.
        """
        if self.content_type is not ContentType.JSON or self._value is _NO_VALUE:
            return
        try:
            data = self.data
        except TypeError as error:  # the value was read from JSON, so only its depth can fail
            raise InvalidRecord(
                f"nested deeper than {DEPTH_LIMIT} levels: flatten the value, or send it as text",
                pointer=pointer,
            ) from error
        if data is not None and too_deep(data, self._value):
            raise InvalidRecord(
                f"nested deeper than {DEPTH_LIMIT} levels: flatten the value, or send it as text",
                pointer=pointer,
            )

    @property
    def size(self) -> int:
        """Length of the encoded value in bytes."""
        if self.ref is not None:
            return self.ref.size
        data = self.data
        assert data is not None
        return len(data)
