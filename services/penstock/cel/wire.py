"""Reads the fields of a protobuf message: the library hands out its syntax tree in no other form.

The tree is that of `cel.expr.CheckedExpr`. Its fields are part of the specification of CEL, and
their numbers do not change. A dependency on protobuf would add its version to those that users
must reconcile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """A message by field number: integers as they are, everything else as bytes."""

    fields: dict[int, list[int | bytes]] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Message:
        """Reads one message.

        Raises:
            ValueError: the bytes are not a message.
        """
        found: dict[int, list[int | bytes]] = {}
        for number, value in _fields(data):
            found.setdefault(number, []).append(value)
        return cls(found)

    def has(self, number: int) -> bool:
        """Whether the message has a field."""
        return number in self.fields

    def integer(self, number: int) -> int:
        """An integer or boolean; 0 when it is absent."""
        value = self.fields.get(number, [0])[-1]
        return value if isinstance(value, int) else 0

    def data(self, number: int) -> bytes:
        """Bytes; empty when they are absent."""
        value = self.fields.get(number, [b""])[-1]
        return value if isinstance(value, bytes) else b""

    def text(self, number: int) -> str:
        """A string; empty when it is absent."""
        return self.data(number).decode("utf-8", "replace")

    def message(self, number: int) -> Message:
        """A message; one without fields when it is absent."""
        return Message.parse(self.data(number))

    def messages(self, number: int) -> list[Message]:
        """The messages of a repeated field."""
        return [Message.parse(value) for value in self.fields.get(number, []) if isinstance(value, bytes)]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            integer, at = _varint(data, at)
            yield number, integer
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} of field {number}")
        if at + length > len(data):
            raise ValueError(f"field {number} is cut")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("an integer is cut")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
        shift += 7
