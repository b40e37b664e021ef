"""docs/reference/flow-definitions.md lists every field of the schema and every code of a fault.

PENSTOCK_WRITE_DOCS=1 pytest tests/contract/test_flow_reference.py    regenerates it.
"""

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest

from penstock.cel import MAX_CHARACTERS
from penstock.cel.bounds import MAX_LOOPS, MAX_SIZE, MAX_STEPS
from penstock.contracts.files import schemas_folder
from penstock.core.flow.plan import Plan
from penstock.core.flow.simulation import simulate
from penstock.flows.assumptions import read_assumptions
from penstock.flows.faults import CODES
from penstock.flows.loading import load
from penstock.flows.validation import MAX_DEPTH, validate

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "reference" / "flow-definitions.md"
HOW_TO = ROOT / "docs" / "how-to" / "validate-flows.md"
ASSUMPTIONS = json.loads((schemas_folder() / "flows" / "assumptions.schema.json").read_text())
SCHEMA = json.loads((schemas_folder() / "flows" / "definition.schema.json").read_text())
EXAMPLE = schemas_folder() / "flows" / "definition.example.yaml"
NODES = {
    "task": "Task",
    "flow": "Child flow",
    "switch": "Switch",
    "wait": "Wait",
    "timer": "Timer",
    "map": "Map",
}
PARTS = {"each_task": "A task for each item", "each_flow": "A flow for each item"}


def shape(field):
    """The type of a field in words, with its bounds."""
    if "$ref" in field:
        name = field["$ref"].removeprefix("#/$defs/")
        return {"expression": "expression", "join": "join", "each": "task or flow"}[name]
    if "enum" in field:
        return " · ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = {"array": "list", "string": "text"}.get(field.get("type"), field.get("type", "any value"))
    low, high = field.get("minimum", field.get("minLength")), field.get("maximum", field.get("maxLength"))
    if "exclusiveMinimum" in field:
        return f"{kind} above {field['exclusiveMinimum']}, at most {high:,}"
    if low is not None and high is not None and kind != "text":
        return f"{kind}, {low:,} to {high:,}"
    return f"{kind}, at least {low:,}" if low is not None and kind != "text" else kind


def row(name, field, required):
    description = field.get("description") or resolved(field).get("description", "")
    default = field.get("default", resolved(field).get("default"))
    text = description + (f" Default: `{json.dumps(default)}`." if default is not None else "")
    needed = "yes" if name in required else ""
    return f"| `{name}` | {shape(field)} | {needed} | {text} |"


def resolved(field):
    return SCHEMA["$defs"][field["$ref"].removeprefix("#/$defs/")] if "$ref" in field else field


def table(part, skipped=()):
    fields = {name: field for name, field in part["properties"].items() if name not in skipped}
    rows = [row(name, field, part.get("required", ())) for name, field in fields.items()]
    return "\n".join(["| field | value | required | meaning |", "| --- | --- | --- | --- |", *rows])


def document():
    nodes = "\n\n".join(
        f"### {title}\n\n{SCHEMA['$defs'][name]['description']}\n\n{table(SCHEMA['$defs'][name])}"
        for name, title in (NODES | PARTS).items()
    )
    top = "\n".join(
        row(name, field, SCHEMA["required"])
        for name, field in SCHEMA["properties"].items()
        if name not in ("nodes", "inputs")
    )
    codes = "\n".join(f"| `{code}` | {meaning} |" for code, meaning in CODES.items())
    return f"""# Flow definitions

`tests/contract/test_flow_reference.py` makes this page from `schemas/flows/definition.schema.json`, and fails when it is out of date.

[Nodes of flows](../how-to/flow-nodes.md) has an example of each kind. [Write and validate flow definitions](../how-to/validate-flows.md) shows the tools,
[start flows](../how-to/start-flows.md) how flows begin.

## Definition

| field | value | required | meaning |
| --- | --- | --- | --- |
{top}
| `inputs` | object | | {SCHEMA["properties"]["inputs"]["description"]} Each has `default` (any value) and `description`, both optional. |
| `nodes` | object | yes | {SCHEMA["properties"]["nodes"]["description"]} At most {SCHEMA["properties"]["nodes"]["maxProperties"]:,}. |

Names of nodes, inputs and cases begin with a small letter, and have at most 63 small letters, digits and `_`. Names of definitions are those of task
types. Child flows are nested at most {MAX_DEPTH} deep. YAML has the types of JSON only: `on` and `2026-11-23` are texts, and aliases are refused.

## Nodes

{nodes}

## Expressions

An expression is text in [CEL](https://cel.dev) with at most {MAX_CHARACTERS:,} characters. It has at most {MAX_LOOPS} comprehensions (`map`, `filter`, `all`, `exists`) in
each other, which take at most {MAX_STEPS:,} steps together. No value may have more than {MAX_SIZE:,} values and characters. [Decision 045](../decisions/045-expressions-in-cel.md)
has the types.

## Faults

| code | meaning |
| --- | --- |
{codes}

## Assumptions

`penstock flows simulate --assume FILE` reads these fields, in YAML or JSON.

{table(ASSUMPTIONS)}

Each node in `nodes` has:

{table(ASSUMPTIONS["properties"]["nodes"]["additionalProperties"])}

## Example

```yaml
{EXAMPLE.read_text().rstrip()}
```
"""


def test_the_page_is_what_the_schema_says():
    """The reference has every field."""
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        FILE.write_text(document())
    assert FILE.read_text() == document()


def every_field(part):
    for name, field in part.get("properties", {}).items():
        yield name, field
        yield from every_field(field)
        yield from every_field(field.get("items", {}))


@pytest.mark.parametrize("name", ["", *SCHEMA["$defs"]])
def test_every_field_has_a_description(name):
    """Users choose values by the description."""
    part = SCHEMA["$defs"][name] if name else SCHEMA
    assert part["description"]
    for field, found in every_field(part):
        if name not in ("node", "each"):
            assert found.get("description") or resolved(found).get("description"), field


def test_the_assumptions_have_a_valid_schema_and_example():
    """An independent validator accepts both."""
    jsonschema.Draft202012Validator.check_schema(ASSUMPTIONS)
    example = load((schemas_folder() / "flows" / "assumptions.example.yaml").read_bytes()).document
    jsonschema.Draft202012Validator(ASSUMPTIONS).validate(example)


def test_the_examples_of_the_how_to_are_valid():
    """Readers copy them: both say the same."""
    text, assumed = re.findall(r"```yaml\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    [program] = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    definition = load(text.encode()).document
    assert validate(definition) == []
    assumptions, faults = read_assumptions(assumed.encode(), definition)
    assert faults == []
    assert simulate(Plan.from_wire(definition), assumptions).slots == 50
    names = {}
    exec(program, names)
    assert names["flow"].definition() == definition


def test_the_examples_of_each_kind_of_node_are_valid():
    """F1: readers copy the definitions of the page, of the tutorial and of the examples. The page
    has each kind of node."""
    page = HOW_TO.with_name("flow-nodes.md").read_text()
    texts = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    texts += [path.read_text() for path in (ROOT / "examples" / "nightly").glob("*.yaml")]
    definitions = {
        document["flow"]: document for document in (load(text.encode()).document for text in texts)
    }
    assert len(definitions) == len(texts)

    def find(name, _version):
        return definitions.get(name)

    for name, document in definitions.items():
        assert validate(document, definitions=find) == [], name
    kinds = {node["kind"] for document in definitions.values() for node in document["nodes"].values()}
    assert kinds == {"task", "flow", "switch", "wait", "timer", "map"}
