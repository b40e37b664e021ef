"""Validation by the JSON Schemas of `schemas/messages`, with errors that point at the field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.errors import InvalidRecord

# In place of a value that may be a secret.
_UNQUOTED = "what is here"

# What the least integers beyond 64 bits look like, every digit made a zero and all else but the minus a NUL.
_LONG = (b"0" * 20, b"-" + b"0" * 19)
_SHAPE = bytes(ord("0") if 48 <= code <= 57 else code if code == ord("-") else 0 for code in range(256))


@cache
def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """The compiled validator of `schemas/messages/<name>.schema.json`."""
    schema = orjson.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


@cache
def _discreet(name: str) -> jsonschema_rs.Draft202012Validator:
    """The same validator, whose messages quote nothing."""
    schema = orjson.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True, mask=_UNQUOTED)


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
    told = _meant(validator(name).iter_errors(document))
    # The same errors in the same order, in words that may be logged and answered whatever was sent.
    discreet = _meant(_discreet(name).iter_errors(document))
    return [
        _fault(quiet if _may_be_secret(error) else error) for error, quiet in zip(told, discreet, strict=True)
    ]


def faults(checked: jsonschema_rs.Draft202012Validator, document: Any) -> list[InvalidRecord]:
    """Everything that `checked` finds at fault in a document without secrets, each with a JSON Pointer."""
    return [_fault(error) for error in _meant(checked.iter_errors(document))]


def _meant(errors: Iterable[jsonschema_rs.ValidationError]) -> Iterator[jsonschema_rs.ValidationError]:
    """The errors, with those of the form that was meant in place of "none of the forms fits".

    Of several forms the one is meant whose type fits; when there is no such one, or more, nothing better can be said.
    """
    for error in errors:
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.OneOfNotValid):
            fitting = [
                form
                for form in error.kind.context
                if not any(
                    isinstance(e.kind, jsonschema_rs.ValidationErrorKind.Type)
                    and e.instance_path == error.instance_path
                    for e in form
                )
            ]
            if len(fitting) == 1:
                yield from _meant(fitting[0])
                continue
        yield error


def _may_be_secret(error: jsonschema_rs.ValidationError) -> bool:
    """Whether a message may quote the value of a callback's header: it is about one, or about what may hold some."""
    value = error.instance
    return (
        "headers" in error.instance_path
        or isinstance(value, dict | list)
        # An object that was encoded twice.
        or (isinstance(value, str) and "headers" in value)
    )


def _fault(error: jsonschema_rs.ValidationError) -> InvalidRecord:
    return InvalidRecord(
        _shorten(_reason(error)), pointer="".join(f"/{_escape(part)}" for part in error.instance_path)
    )


def _require_64_bits(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise InvalidRecord(f"the integer {_shorten(digits)} has more than 64 bits: send it as a string")
    return int(digits)


def _reason(error: jsonschema_rs.ValidationError) -> str:
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Enum) and isinstance(error.instance, str):
        # The library names two choices and counts the others, but whoever mistyped one needs all of them.
        choices = ", ".join(orjson.dumps(choice).decode() for choice in error.kind.options)
        return f"{orjson.dumps(error.instance).decode()} is not one of {choices}"
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.OneOfNotValid):
        kinds = [e.kind for form in error.kind.context for e in form]
        types = [kind.types for kind in kinds if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type)]
        if len(types) == len(kinds):
            value, _, _ = error.message.partition(" is not valid under any")
            return f"{value} is neither {' nor '.join(name for some in types for name in some)}"
    return error.message


def _escape(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _shorten(message: str) -> str:
    # A message may quote the whole value; a megabyte of it helps nobody.
    return message if len(message) <= 300 else f"{message[:200]} … {message[-80:]}"
