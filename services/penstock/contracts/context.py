"""The context of a task, which is the input of its stage: inline, or by reference (claim check).

On the wire a context is two fields of its record: `content_type` (json, text, url or bytes), and
either `context` (the value, in base64 for bytes) or `context_ref` (its place in the object store).
Results use the same form with other field names.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from penstock.contracts.parsing import require_exact_integers
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.errors import InvalidRecord, TooLarge

# T4: larger contexts go to the object store.
INLINE_LIMIT_BYTES = 4096
# A shorter JSON text stays below the limit when it is encoded again: `1e15` grows to a 1 and 17
# further characters, which is the most.
_MAY_GROW_BYTES = 900
# Most levels of arrays and objects in a value. orjson reads 1,024 levels but writes only 254, and
# records and events put further levels around a context.
DEPTH_LIMIT = 200
_ORJSON_DEPTH = 254
# Objects of contexts, apart from the archive in the same store.
CONTEXTS_PREFIX = "contexts/"
# The namespace, which is absent in the default one, and the digest with its first two digits.
_KEY = re.compile(rf"{CONTEXTS_PREFIX}(?:([A-Za-z0-9_-]{{1,100}})/)?([0-9a-f]{{2}})/(\2[0-9a-f]{{62}})")


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

    @classmethod
    def of(cls, data: bytes, namespace: str = DEFAULT_NAMESPACE) -> ObjectRef:
        """The reference of a context's bytes: namespace and digest name its place."""
        return cls.named(hashlib.sha256(data).hexdigest(), len(data), namespace)

    @classmethod
    def named(cls, digest: str, size: int, namespace: str) -> ObjectRef:
        """The reference of a context of so many bytes with this SHA-256."""
        return cls(_key_of(digest, namespace), digest, size)

    @property
    def namespace(self) -> str:
        """The namespace that the key names."""
        found = _KEY.fullmatch(self.key)
        return (found and found[1]) or DEFAULT_NAMESPACE

    def require_own_key(self, pointer: str = "") -> None:
        """Requires a key that the digest names; another key could lead to any other object.

        Raises:
            InvalidRecord: the key is another one.
        """
        digest: Any = self.sha256
        key: Any = self.key
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if found is None or key != _key_of(str(digest), found[1] or DEFAULT_NAMESPACE):
            raise InvalidRecord(
                f"not the key of a context: store it at {_key_of(str(digest)[:64], 'NAMESPACE')}, "
                "without NAMESPACE/ in the default one",
                pointer=f"{pointer}/key" if pointer else "",
            )
        size: Any = self.size
        if type(size) is not int or size < 0:
            raise InvalidRecord("not a size in bytes", pointer=f"{pointer}/size" if pointer else "")

    def require_namespace(self, namespace: str, pointer: str = "") -> None:
        """Requires a key of a namespace, that of the task: other objects belong to others.

        Raises:
            InvalidRecord: the key names another namespace.
        """
        if self.namespace != namespace:
            raise InvalidRecord(
                f"an object of another namespace: store the context at {_key_of(self.sha256, namespace)}",
                pointer=f"{pointer}/key" if pointer else "",
            )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `context_ref`."""
        return {"key": self.key, "sha256": self.sha256, "size": self.size}

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> ObjectRef:
        """Reads a `context_ref` that conforms to its schema."""
        # JSON Schema counts 81.0 among the integers.
        size = raw["size"]
        return cls(raw["key"], raw["sha256"], int(size) if isinstance(size, float) else size)


def _key_of(digest: str, namespace: str) -> str:
    folder = "" if namespace == DEFAULT_NAMESPACE else f"{namespace}/"
    return f"{CONTEXTS_PREFIX}{folder}{digest[:2]}/{digest}"


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


def not_finite(value: Any) -> float | None:
    """A number in `value` that JSON cannot express (infinity or NaN); None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return None
    return next((found for item in value if (found := not_finite(item)) is not None), None)


def _require_text(content_type: ContentType, text: str) -> None:
    if content_type is ContentType.URL and "://" not in text:
        raise InvalidRecord("not an absolute URL: begin it with scheme://")


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
    def encode(cls, value: Any, default: Callable[[Any], Any] | None = None) -> Context:
        """The context of a Python value: bytes stay bytes, and any other value becomes JSON.

        Text and URLs become JSON strings. For another content type pass a context:
        `Context(ContentType.TEXT, b"...")`.

        Args:
            value: any JSON value, bytes, or a context.
            default: called with each object that is no JSON; returns a JSON value or raises
                `TypeError`.

        Raises:
            InvalidRecord: JSON cannot express the value.
        """
        if isinstance(value, Context):
            return value.checked()
        if isinstance(value, bytes | bytearray):
            return cls(ContentType.BYTES, bytes(value))
        try:
            data = orjson.dumps(value, default)
            # `orjson.Fragment` in a value is copied unread. In a record it could become another
            # entry.
            again = orjson.loads(data)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRecord(
                f"the context is not JSON: {error}; pass JSON values or bytes", pointer="/context"
            ) from error
        # orjson writes infinity and NaN as null, without an error.
        if b"null" in data and (number := not_finite(value)) is not None:
            raise InvalidRecord(
                f"the context is not JSON: {number} is not JSON; pass null or a string instead",
                pointer="/context",
            )
        if too_deep(data, again):
            raise InvalidRecord(
                f"the context is nested deeper than {DEPTH_LIMIT} levels: flatten it, or send it as text",
                pointer="/context",
            )
        if _MAY_GROW_BYTES < len(data) <= INLINE_LIMIT_BYTES:
            # A fragment's bytes may be shorter than the same value after encoding, whose size
            # counts.
            data = orjson.dumps(again)
        return cls(ContentType.JSON, data)

    def checked(self) -> Context:
        """The context, once it is known that its content type, data and reference fit together.

        Raises:
            InvalidRecord: they do not.
        """
        try:
            content_type = ContentType(self.content_type)
        except ValueError as error:
            raise InvalidRecord(
                f"the content type of a context is one of {', '.join(_CONTENT_TYPES)}",
                pointer="/content_type",
            ) from error
        ref: Any = self.ref
        if ref is not None:
            if not isinstance(ref, ObjectRef):
                raise InvalidRecord("the reference of a context is an ObjectRef", pointer="/context_ref")
            ref.require_own_key("/context_ref")
            return Context(content_type, ref=ref)
        if content_type is ContentType.JSON and self._data is None and self._value is not _NO_VALUE:
            return Context.encode(self._value)
        data: Any = self._data
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidRecord(
                f"the data of a context is bytes, not {type(data).__name__}", pointer="/context"
            )
        data = bytes(data)
        try:
            if content_type is ContentType.JSON:
                require_exact_integers(data)
                return Context.encode(orjson.loads(data))
            if content_type is not ContentType.BYTES:
                _require_text(content_type, data.decode())
        except (ValueError, RecursionError, InvalidRecord) as error:
            raise InvalidRecord(
                f"the data of the context is not {content_type.value}: {error}", pointer="/context"
            ) from error
        return Context(content_type, data)

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
            deep = too_deep(self.data or b"", self._value)
        except TypeError:  # the value was read from JSON, so only its depth can fail
            deep = True
        if deep:
            raise InvalidRecord(
                f"nested deeper than {DEPTH_LIMIT} levels: flatten the value, or send it as text",
                pointer=pointer,
            )

    def require_inline(self, pointer: str = "/context") -> None:
        """Requires an inline value that a record may carry, by its size after encoding.

        Raises:
            TooLarge: it is larger than `INLINE_LIMIT_BYTES`.
        """
        if self.ref is None and self.size > INLINE_LIMIT_BYTES:
            raise TooLarge(
                f"the context has {self.size:,} bytes after encoding; {INLINE_LIMIT_BYTES:,} is the limit of "
                "an inline one: store it in the object store, and send its reference",
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
