"""The API reference: one HTML page from the OpenAPI description, without external assets."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import orjson

from penstock.gateway.openapi import document

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --dim: #777; --link: #0b62c4;
  --get: #1f7a4d; --post: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --dim: #999; --link: #6cb2ff; --get: #58c48d; --post: #e5a54b; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif; display: flex; justify-content: center; }
nav { position: sticky; top: 0; height: 100vh; overflow: auto; width: 19rem; padding: 1.5rem 1rem; flex: none;
  border-right: 1px solid var(--line); font-size: .85rem; }
nav ul { list-style: none; margin: .2rem 0 1rem; padding: 0; }
main { width: min(54rem, 100%); padding: 1.5rem 2rem 6rem; min-width: 0; }
main.home { padding-top: 4rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
h3 { margin: 2.2rem 0 .3rem; font: 600 1.02rem ui-monospace, monospace; } h4 { margin: 1.1rem 0 .2rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
code, pre { font-family: ui-monospace, monospace; font-size: .86em; }
code { background: var(--soft); padding: .1em .3em; border-radius: 4px; overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; overflow: auto; }
pre code { background: none; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--dim); }
.verb { font: 600 .72rem ui-monospace, monospace; display: inline-block; min-width: 2.9rem; }
.GET { color: var(--get); } .POST { color: var(--post); }
.dim { color: var(--dim); } .required { color: var(--post); font-size: .8em; }
summary { cursor: pointer; color: var(--dim); font-size: .9rem; margin-top: .5rem; }
@media (max-width: 60rem) { nav { display: none; } main { padding: 1rem; } }
"""


@cache
def render() -> str:
    """The page."""
    api = document()
    info = api["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    body = "".join(
        (
            f"<h1>{title}</h1>",
            _prose(info["description"]),
            *(_section(api, tag) for tag in api["tags"]),
            '<h2 id="schemas">Schemas</h2>',
            *(_schema(name, schema) for name, schema in api["components"]["schemas"].items()),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><nav>{_contents(api)}</nav><main>{body}</main></body></html>"
    )


def _operations(api: Mapping[str, Any], tag: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, item in api["paths"].items():
        for method, operation in item.items():
            if tag in operation["tags"]:
                yield method.upper(), path, operation


def _contents(api: Mapping[str, Any]) -> str:
    parts = ['<p><a href="/">Penstock gateway</a></p>']
    for tag in api["tags"]:
        rows = "".join(
            f'<li><a href="#{operation["operationId"]}"><span class="verb {method}">{method}</span> '
            f"{html.escape(path)}</a></li>"
            for method, path, operation in _operations(api, tag["name"])
        )
        parts.append(f"<strong>{html.escape(tag['name'])}</strong><ul>{rows}</ul>")
    rows = "".join(f'<li><a href="#schema-{name}">{name}</a></li>' for name in api["components"]["schemas"])
    parts.append(f'<strong>Schemas</strong><ul>{rows}</ul><p><a href="/openapi.json">openapi.json</a></p>')
    return "".join(parts)


def _section(api: Mapping[str, Any], tag: Mapping[str, str]) -> str:
    operations = "".join(_operation(api, *found) for found in _operations(api, tag["name"]))
    return f"<h2>{html.escape(tag['name'])}</h2>{_prose(tag['description'])}{operations}"


def _operation(api: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [
        f'<h3 id="{operation["operationId"]}"><span class="verb {method}">{method}</span> {html.escape(path)}</h3>',
        f"<p><strong>{html.escape(operation['summary'])}</strong></p>",
        _prose(operation.get("description", "")),
    ]
    parameters = [_resolve(api, raw) for raw in operation.get("parameters", ())]
    if parameters:
        parts.append(
            _table(
                ("Parameter", "In", "Description"),
                (
                    (
                        f"<code>{html.escape(p['name'])}</code>",
                        p["in"],
                        f"{_kind(p['schema'])}. {_inline(p['description'])}",
                    )
                    for p in parameters
                ),
            )
        )
    if "requestBody" in operation:
        media = operation["requestBody"]["content"]["application/json"]
        parts.append(f"<h4>Body</h4><p>{_kind(media['schema'])}</p>{_examples(media)}")
    parts.append("<h4>Responses</h4>")
    rows = []
    for status, raw in operation["responses"].items():
        response = _resolve(api, raw)
        content: Mapping[str, Mapping[str, Any]] = response.get("content", {})
        media = next(iter(content.values()), {})
        kind = f" {_kind(media['schema'])}" if "schema" in media else ""
        rows.append(
            (f"<code>{status}</code>", f"{_inline(response['description'])}{kind}{_examples(media)}"),
        )
    parts.append(_table(("Status", "Description"), rows))
    return "".join(parts)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    rows = []
    # Only the alternative with fields needs a table.
    alternatives = [option for option in schema.get("oneOf", ()) if "properties" in option]
    fields = alternatives[0] if alternatives and "properties" not in schema else schema
    required = set(fields.get("required", ()))
    for field, detail in fields.get("properties", {}).items():
        mark = ' <span class="required">required</span>' if field in required else ""
        rows.append(
            (
                f"<code>{html.escape(field)}</code>{mark}",
                _kind(detail),
                _inline(detail.get("description", "")),
            )
        )
    table = _table(("Field", "Type", "Description"), rows) if rows else f"<p>{_kind(schema)}</p>"
    return f'<h3 id="schema-{name}">{name}</h3>{_prose(schema.get("description", ""))}{table}'


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a schema as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#schema-{name}">{name}</a>'
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " | ".join(f"<code>{html.escape(str(value))}</code>" for value in values)
    if "oneOf" in schema and "properties" not in schema:
        return " or ".join(_kind(option) for option in schema["oneOf"])
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    kinds = schema.get("type", "any JSON value")
    words = kinds if isinstance(kinds, str) else " or ".join(kinds)
    if "format" in schema:
        words += f" ({schema['format']})"
    return html.escape(words) + _limits(schema)


def _limits(schema: Mapping[str, Any]) -> str:
    limits = []
    if "maximum" in schema:
        limits.append(f"{schema.get('minimum', 0):,} to {schema['maximum']:,}")
    elif "minimum" in schema:
        limits.append(f"from {schema['minimum']:,}")
    if "maxLength" in schema:
        limits.append(f"at most {schema['maxLength']:,} characters")
    if "default" in schema:
        limits.append(f"default {schema['default']}")
    return f' <span class="dim">{html.escape(", ".join(limits))}</span>' if limits else ""


def _examples(media: Mapping[str, Any]) -> str:
    parts = []
    for example in media.get("examples", {}).values():
        value = orjson.dumps(example["value"], option=orjson.OPT_INDENT_2).decode()
        parts.append(
            f"<details><summary>{html.escape(example['summary'])}</summary>"
            f"<pre><code>{html.escape(value)}</code></pre></details>"
        )
    return "".join(parts)


def _resolve(api: Mapping[str, Any], raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The response or parameter itself, or that to which `$ref` leads."""
    if "$ref" not in raw:
        return raw
    kind, name = raw["$ref"].split("/")[-2:]
    resolved: Mapping[str, Any] = api["components"][kind][name]
    return resolved


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _prose(text: str) -> str:
    return "".join(f"<p>{_inline(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph)


def _inline(text: str) -> str:
    """Escapes a text; words in backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
