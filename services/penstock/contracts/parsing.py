"""Reads JSON text; an array whose record cannot be read as a whole is read entry by entry.

One parser reads a whole record, because that is fast. It refuses the record for one lone surrogate,
one number out of range or one value that is nested too deep, although these are faults of a single
entry. Only then is the record cut into its entries, without reading their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.errors import InvalidRecord, TooLarge

# The broker limits records as they are sent, and a compressed one may be far larger.
MAX_PARSED_BYTES = 4 * 1024 * 1024
# The most entries of a record. Each entry costs time and, when it is faulty, a rejection.
MAX_ENTRIES = 10_000

# A table for `bytes.translate` that makes each digit a zero and each other byte but the minus a
# NUL. In the translation of a JSON text, an integer beyond 64 bits contains one of the patterns.
_LONG_INTEGERS = (b"0" * 20, b"-" + b"0" * 19)
_DIGIT_TABLE = bytes(ord("0") if 48 <= code <= 57 else code if code == ord("-") else 0 for code in range(256))

# A string, or a character that structures the text. Everything else belongs to a number or a word.
# A string without its end is a token too: with a search behind its first byte, the time for a text
# of such strings would be quadratic.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},:]', re.DOTALL)
_BLANKS = b" \t\r\n"


def parse(data: bytes, *, exact: bool = False, unique: bool = False) -> Any:
    """Decodes JSON.

    Args:
        data: the encoded document.
        exact: refuse integers that would be rounded.
        unique: refuse a name that stands twice in an object. The check takes several times as long
            as the rest, so that routes with much traffic go without it.

    Raises:
        InvalidRecord: the data is not UTF-8 or not JSON; the reason names the place. Or a name
            stands twice; `pointer` is its place.
        TooLarge: the data has more than `MAX_PARSED_BYTES`.
    """
    if len(data) > MAX_PARSED_BYTES:
        raise TooLarge(f"{len(data):,} bytes of JSON; {MAX_PARSED_BYTES:,} is the limit: send less at once")
    try:
        if exact:
            require_exact_integers(data)
        document = orjson.loads(data)
        if unique:
            _require_unique_names(data)
        return document
    except RecursionError as error:
        raise InvalidRecord("nested too deep: flatten the document") from error
    except ValueError as error:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as invalid:
            raise InvalidRecord(f"not UTF-8: byte {invalid.start} is 0x{data[invalid.start]:02x}") from error
        raise InvalidRecord(f"not JSON: {error}") from error


def require_exact_integers(data: bytes) -> None:
    """Requires that the integers of a JSON text have at most 64 bits; others would be rounded.

    Raises:
        InvalidRecord: an integer has more.
        ValueError, RecursionError: the text is not JSON.
    """
    # The translation is cheap, and so many digits are rare. Only then is the slow parser of
    # integers used.
    digits = data.translate(_DIGIT_TABLE)
    if any(pattern in digits for pattern in _LONG_INTEGERS):
        json.loads(data, parse_int=_require_64_bits)


class _Members(list[tuple[str, Any]]):
    """The members of an object, with those whose names stand there before."""


def _require_unique_names(data: bytes) -> None:
    repeats = False

    def read(members: list[tuple[str, Any]]) -> None:
        nonlocal repeats
        repeats = repeats or len(members) > len(dict(members))

    json.loads(data, object_pairs_hook=read)
    if repeats:
        at, name = next(_repeated_names(json.loads(data, object_pairs_hook=_Members), ""))
        shown = name if len(name) <= 100 else f"{name[:100]} …"
        raise InvalidRecord(f"{shown!r} stands twice: remove one, or rename it", pointer=at)


def _repeated_names(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """The names that stand in an object before, each behind its JSON Pointer."""
    if isinstance(value, _Members):
        names: set[str] = set()
        for name, member in value:
            below = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
            if name in names:
                yield below, name
            names.add(name)
            yield from _repeated_names(member, below)
    elif isinstance(value, list):
        for index, element in enumerate(value):
            yield from _repeated_names(element, f"{at}/{index}")


def _require_64_bits(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        shown = digits if len(digits) <= 100 else f"{digits[:100]} …"
        raise InvalidRecord(f"the integer {shown} has more than 64 bits: send it as a string")
    return int(digits)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry that cannot be read as a whole.

    Attributes:
        fault: why.
        data: the entry's bytes.
        readable: the members that can be read alone, which may tell whose entry it is.
    """

    fault: InvalidRecord
    data: bytes
    readable: dict[str, Any]


def parse_batch(data: bytes, member: str, *, exact: bool = False, unique: bool = False) -> Any:
    """Decodes a record with an array of entries; an entry that cannot be read is `Unreadable`.

    Args:
        data: the encoded record.
        member: name of the array in the record's object; "" when the record is the array.
        exact: as for `parse`.
        unique: as for `parse`.

    Raises:
        InvalidRecord: the record as a whole cannot be read.
        TooLarge: as `parse`.
    """
    try:
        return parse(data, exact=exact, unique=unique)
    except InvalidRecord as fault:
        if member == "":
            return _entries(data, fault, exact=exact, unique=unique)
        record: dict[str, Any] = {}
        found = False
        for name, value in _members(data, fault):
            if name == member and value[:1] == b"[":
                record[name], found = _entries(value, fault, exact=exact, unique=unique), True
            else:
                record[name] = parse(value, exact=exact, unique=unique)
        if not found:
            raise
        return record


def _entries(data: bytes, fault: InvalidRecord, *, exact: bool, unique: bool) -> list[Any]:
    entries: list[Any] = []
    for part in _parts(data, b"[", b"]", fault):
        [value] = part[-1:]
        try:
            entries.append(parse(value, exact=exact, unique=unique))
        except InvalidRecord as unreadable:
            entries.append(Unreadable(unreadable, value, _readable_members(value)))
    return entries


def _readable_members(data: bytes) -> dict[str, Any]:
    readable: dict[str, Any] = {}
    try:
        for name, value in _members(data, InvalidRecord("not an object")):
            try:
                readable[name] = parse(value)
            except InvalidRecord:
                continue
    except InvalidRecord:
        return {}
    return readable


def _members(data: bytes, fault: InvalidRecord) -> Iterator[tuple[str, bytes]]:
    for part in _parts(data, b"{", b"}", fault):
        if len(part) != 2:
            raise fault
        name = parse(part[0])
        if not isinstance(name, str):
            raise fault
        yield name, part[1]


def _parts(  # noqa: C901 (one pass over the tokens, with the state of a parser)
    data: bytes, begin: bytes, end: bytes, fault: InvalidRecord
) -> list[list[bytes]]:
    """Cuts an array or object at its commas, and each part at its colons.

    Raises:
        InvalidRecord: `fault`, since its brackets do not match or something follows it.
        TooLarge: it has more than `MAX_ENTRIES` parts.
    """
    data = data.strip(_BLANKS)
    if data[:1] != begin or data[-1:] != end:
        raise fault
    parts: list[list[bytes]] = [[]]
    closers: list[bytes] = []
    from_byte = 1
    for token in _TOKEN.finditer(data):
        found = token.group()
        if found in (b"[", b"{"):
            closers.append(b"]" if found == b"[" else b"}")
        elif found in (b"]", b"}"):
            if not closers or closers.pop() != found:
                raise fault
            if closers:
                continue
            if token.end() != len(data):
                raise fault
            last = data[from_byte : token.start()].strip(_BLANKS)
            if last or parts[-1] or len(parts) > 1:
                parts[-1].append(last)
        elif len(closers) == 1 and (found == b"," or (found == b":" and begin == b"{")):
            parts[-1].append(data[from_byte : token.start()].strip(_BLANKS))
            from_byte = token.end()
            if found == b",":
                if len(parts) == MAX_ENTRIES:
                    raise TooLarge(f"more than {MAX_ENTRIES:,} entries: send several records")
                parts.append([])
    if closers or not all(value for part in parts for value in part):
        raise fault
    return [part for part in parts if part]
