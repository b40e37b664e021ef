"""The description of the API: `schemas/http/openapi` joined, with `schemas/messages` inlined.

`shared.json` has what several tags use. The file of a tag has its paths and the rest that they use.

The gateway validates request bodies by this description, so that it cannot differ from the service.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.contracts.validation import faults
from penstock.errors import InvalidRecord, one_or_all

_MESSAGE_REFERENCE = "../../messages/"


@cache
def document() -> dict[str, Any]:
    """The whole description; all its references are internal."""
    raw = read_part("shared")
    raw["paths"] = {}
    for tag in raw["tags"]:
        of_tag = read_part(tag["name"])
        raw["paths"] |= of_tag["paths"]
        for kind, components in of_tag["components"].items():
            raw["components"][kind] |= components
    schemas = raw["components"]["schemas"]
    for name, schema in schemas.items():
        reference = schema.get("$ref", "")
        if reference.startswith(_MESSAGE_REFERENCE):
            schemas[name] = _message_schema(reference)
    return raw


def read_part(name: str) -> dict[str, Any]:
    """Reads the file of a tag, or `shared`."""
    file = schemas_folder() / "http" / "openapi" / f"{name.lower().replace(' ', '-')}.json"
    part: dict[str, Any] = orjson.loads(file.read_bytes())
    return part


@cache
def encoded() -> bytes:
    """The description as JSON."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2)


def _message_schema(reference: str) -> dict[str, Any]:
    file, _, pointer = reference.removeprefix(_MESSAGE_REFERENCE).partition("#")
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
        InvalidRecord: the body has one fault.
        Faults: the body has several faults.
    """
    found = find_faults(raw, name)
    if found:
        raise one_or_all(found)


def find_faults(raw: Any, name: str) -> list[InvalidRecord]:
    """The faults of a document by one of the description's schemas."""
    return faults(_validator(name), raw)
