"""Writes the TypeScript types of the API's answers from its OpenAPI description.

python infra/console_types.py services/console/src/lib/api-types.ts
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.gateway.openapi import document

_HEAD = "// Written by infra/console_types.py from schemas/http/openapi. Do not edit.\n"
_PRIMITIVES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}


def type_script() -> str:
    """The types of all schemas and of the answers of all routes."""
    api = document()
    lines = [_HEAD]
    for name, schema in sorted(api["components"]["schemas"].items()):
        lines.append(f"export type {_identifier(name)} = {_type(schema)};\n")
    lines.append("/** Answers of routes, by method and path. */\nexport interface Answers {")
    lines += [f"  {json.dumps(route)}: {_type(schema)};" for route, schema in _answers(api)]
    lines.append("}\n")
    return "\n".join(lines)


def _answers(api: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, operations in sorted(api["paths"].items()):
        for method, operation in operations.items():
            for status, response in operation["responses"].items():
                schema = response.get("content", {}).get("application/json", {}).get("schema")
                if status.startswith("2") and schema is not None:
                    yield f"{method.upper()} {path}", schema
                    break


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name[0].upper() + name[1:])


def _type(schema: Any) -> str:
    if schema is True or not schema:
        return "unknown"
    if "$ref" in schema:
        return _identifier(schema["$ref"].rpartition("/")[2])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return " | ".join(json.dumps(value) for value in values)
    # A choice beside types or properties only restricts them.
    if "properties" not in schema and "type" not in schema:
        for key, joint in (("oneOf", " | "), ("anyOf", " | "), ("allOf", " & ")):
            if key in schema:
                return joint.join(_grouped(each) for each in schema[key])
    return _plain(schema, schema.get("type", "object" if "properties" in schema else None))


def _plain(schema: Mapping[str, Any], kinds: Any) -> str:
    if isinstance(kinds, list):
        return " | ".join(_grouped({**schema, "type": kind}) for kind in kinds)
    if kinds == "array":
        return f"{_grouped(schema.get('items', {}))}[]"
    if kinds == "object":
        return _object(schema)
    return _PRIMITIVES.get(kinds, "unknown")


def _grouped(schema: Any) -> str:
    text = _type(schema)
    return f"({text})" if " | " in text or " & " in text else text


def _object(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    fields = [
        f"{json.dumps(name)}{'' if name in required else '?'}: {_type(each)}"
        for name, each in schema.get("properties", {}).items()
    ]
    more = schema.get("additionalProperties")
    if not fields:
        return f"Record<string, {_type(more) if isinstance(more, Mapping) else 'unknown'}>"
    return "{ " + "; ".join(fields) + " }"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(type_script())
