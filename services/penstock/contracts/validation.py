"""Validation by the JSON Schemas of `schemas/messages`, with errors that point at the field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.errors import InvalidRecord

# What the least integers beyond 64 bits look like, every digit made a zero and all else but the minus a NUL.
_LONG = (b"0" * 20, b"-" + b"0" * 19)
_SHAPE = bytes(ord("0") if 48 <= code <= 57 else code if code == ord("-") else 0 for code in range(256))


@cache
def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """The compiled validator of `schemas/messages/<name>.schema.json`."""
    schema = orjson.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def parse(data: bytes, *, exact: bool = False) -> Any:
    """Decodes JSON.

    Args:
        data: as it came.
        exact: refuse integers that would be rounded.

    Raises:
        InvalidRecord: not UTF-8, or not JSON; the reason tells where.
    """
    try:
        if exact:
            # So many digits in a row are rare, and finding out is cheap; only then is a slower look worth it.
            shape = data.translate(_SHAPE)
            if any(long in shape for long in _LONG):
                json.loads(data, parse_int=_require_64_bits)
        return orjson.loads(data)
    except RecursionError as error:
        raise InvalidRecord("nested too deep") from error
    except ValueError as error:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as wrong:
            raise InvalidRecord(f"not UTF-8: byte {wrong.start} is 0x{data[wrong.start]:02x}") from error
        raise InvalidRecord(f"not JSON: {error}") from error


def conform(document: Any, name: str) -> None:
    """Checks a document against a schema.

    Raises:
        InvalidRecord: the first thing at fault, with a JSON Pointer to it.
    """
    checked = validator(name)
    if checked.is_valid(document):
        return
    raise problems(document, name)[0]


def problems(document: Any, name: str) -> list[InvalidRecord]:
    """Everything at fault in a document, each with a JSON Pointer; empty when it conforms."""
    return faults(validator(name), document)


def faults(checked: jsonschema_rs.Draft202012Validator, document: Any) -> list[InvalidRecord]:
    """Everything that `checked` finds at fault in a document, each with a JSON Pointer."""
    return [
        InvalidRecord(
            _shorten(_reason(error)), pointer="".join(f"/{_escape(part)}" for part in error.instance_path)
        )
        for error in checked.iter_errors(document)
    ]


def _require_64_bits(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise InvalidRecord(f"the integer {_shorten(digits)} has more than 64 bits: send it as a string")
    return int(digits)


def _reason(error: jsonschema_rs.ValidationError) -> str:
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Enum) and isinstance(error.instance, str):
        # The library names two choices and counts the others, but whoever mistyped one needs all of them.
        choices = ", ".join(orjson.dumps(choice).decode() for choice in error.kind.options)
        return f"{orjson.dumps(error.instance).decode()} is not one of {choices}"
    return error.message


def _escape(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _shorten(message: str) -> str:
    # A message may quote the whole value; a megabyte of it helps nobody.
    return message if len(message) <= 300 else f"{message[:200]} … {message[-80:]}"
