"""The API's description: `schemas/http/openapi.json` with the schemas of `schemas/messages` put where it names them.

The file is the authority for the requests that have no message of their own, as the message schemas are for the
others: both are what requests are checked by, so neither can drift from what is served.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.contracts.validation import faults
from penstock.errors import InvalidRecord
from penstock.http.problems import Faults

_OUTSIDE = "../messages/"


@cache
def document() -> dict[str, Any]:
    """The whole description; every reference is inside it."""
    raw: dict[str, Any] = orjson.loads((schemas_folder() / "http" / "openapi.json").read_bytes())
    schemas = raw["components"]["schemas"]
    for name, schema in schemas.items():
        reference = schema.get("$ref", "")
        if reference.startswith(_OUTSIDE):
            schemas[name] = _message(reference)
    return raw


@cache
def encoded() -> bytes:
    """The description as it is served."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2)


def _message(reference: str) -> dict[str, Any]:
    file, _, pointer = reference.removeprefix(_OUTSIDE).partition("#")
    schema: dict[str, Any] = orjson.loads((schemas_folder() / "messages" / file).read_bytes())
    for part in pointer.split("/")[1:]:
        schema = schema[part]
    return {key: value for key, value in schema.items() if key not in ("$schema", "$id")}


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def conform(raw: Any, name: str) -> None:
    """Checks a request body against one of the description's schemas.

    Raises:
        InvalidRecord: the one thing at fault.
        Faults: all of them, when there are several.
    """
    found = problems_in(raw, name)
    if found:
        raise found[0] if len(found) == 1 else Faults(found)


def problems_in(raw: Any, name: str) -> list[InvalidRecord]:
    """Everything at fault in a document by one of the description's schemas; empty when it conforms."""
    return faults(_validator(name), raw)
