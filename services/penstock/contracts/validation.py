"""Validation by the JSON Schemas of `schemas/messages`, with errors that point at the field."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.errors import InvalidRecord


@cache
def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """The compiled validator of `schemas/messages/<name>.schema.json`."""
    schema = orjson.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def parse(data: bytes) -> Any:
    """Decodes JSON.

    Raises:
        InvalidRecord: not UTF-8, or not JSON; the reason tells where.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
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
            _shorten(error.message), pointer="".join(f"/{_escape(part)}" for part in error.instance_path)
        )
        for error in checked.iter_errors(document)
    ]


def _escape(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _shorten(message: str) -> str:
    # A message may quote the whole value; a megabyte of it helps nobody.
    return message if len(message) <= 300 else f"{message[:200]} … {message[-80:]}"
