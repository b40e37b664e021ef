"""Validation of definitions: all faults at once, each with its place, its code and what to do."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.flows import Owner, World

from penstock.core.flow.plan import Plan
from penstock.flows.faults import CODES, Fault
from penstock.flows.loading import MAX_BYTES, load
from penstock.flows.validation import MAX_DEPTH, validate, validate_text

SCHEMAS = Path(__file__).parents[3] / "schemas" / "flows"
EXAMPLE = load((SCHEMAS / "definition.example.yaml").read_bytes()).document
TASK = {"kind": "task", "type": "t"}


def flow(**nodes):
    return {"flow": "f", "version": 1, "nodes": nodes}


def task(*after, **fields):
    return {**TASK, **({"after": list(after)} if after else {}), **fields}


def switch(*after, **fields):
    cases = [{"case": "big", "when": "inputs.n > 5"}]
    return {
        "kind": "switch",
        "cases": cases,
        "else": "small",
        **({"after": list(after)} if after else {}),
        **fields,
    }


def found(document, **arguments):
    return [(fault.code, fault.pointer) for fault in validate(document, **arguments)]


def only(document, **arguments):
    [fault] = validate(document, **arguments)
    return fault


def test_the_fault_of_too_many_nodes_does_not_quote_them():
    """F1: the message began with a dump of all nodes."""
    fault = only(flow(**{f"n{number}": task() for number in range(1_001)}), types={"t"})
    assert fault == Fault("schema", "/nodes", "the object has more than 1000 properties")


def test_the_schema_is_valid_and_so_is_its_example():
    """Our validator and an independent one accept the example, and it can be planned and run."""
    schema = json.loads((SCHEMAS / "definition.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(EXAMPLE)
    assert validate(EXAMPLE) == []
    world = World(cases={"size_of_report": "large"}, totals={"load": 120})
    owner = Owner(Plan.from_wire(EXAMPLE), world).begin().run()
    assert owner.flow.status == "succeeded"
    assert set(owner.statuses().values()) == {"succeeded"}


def change(name, **fields):
    document = copy.deepcopy(EXAMPLE)
    node = document["nodes"][name]
    node.update(fields)
    document["nodes"][name] = {field: value for field, value in node.items() if value is not None}
    return document


@pytest.mark.parametrize(
    ("document", "code", "pointer", "words"),
    [
        (5, "schema", "", "object"),
        (change("size_of_report", **{"else": None}), "schema", "/nodes/size_of_report", "'else'"),
        (change("publish", kind="tsk"), "schema", "/nodes/publish/kind", '"task", "flow", "switch"'),
        (change("publish", kind=None), "schema", "/nodes/publish", "kind"),
        (change("publish", typ="x"), "schema", "/nodes/publish", "typ"),
        (change("publish", join="some"), "schema", "/nodes/publish/join", '"all", "all_done", "any"'),
        (change("publish", join={"k": 0}), "schema", "/nodes/publish/join/k", "1"),
        (change("publish", finish_within_s=0), "schema", "/nodes/publish/finish_within_s", "0"),
        (change("cool_down", until="x"), "schema", "/nodes/cool_down", "either `delay_s` or `until`"),
        (change("cool_down", delay_s=None), "schema", "/nodes/cool_down", "either `delay_s` or `until`"),
        (change("approval", flow="a", tick="same", key=None), "schema", "/nodes/approval", "either `event` or `flow`"),
        (change("approval", event=None, key=None), "schema", "/nodes/approval", "either `event` or `flow`"),
        (change("approval", event=None, key=None, flow="a"), "schema", "/nodes/approval", "tick"),
        (
            change("approval", event=None, key=None, flow="nightly", tick="same"),
            "awaited_flow",
            "/nodes/approval/flow",
            "wait for itself",
        ),
        (
            change("approval", event=None, key=None, flow="acme--load", tick="same"),
            "awaited_flow",
            "/nodes/approval/flow",
            "the namespace acme",
        ),
        (change("approval", event="acme--ok"), "foreign_event", "/nodes/approval/event", "the namespace acme"),
        (change("publish", type=None), "schema", "/nodes/publish", "a task needs the field 'type'"),
        (change("load", each={"kind": "flow"}), "schema", "/nodes/load/each", "a flow needs the field 'flow'"),
        (change("size_of_report", cases=[{"case": "large"}]), "schema", "/nodes/size_of_report/cases/0", "needs the field 'when'"),
        (flow(a=TASK, b=None), "schema", "/nodes/b", "object"),
        (flow(a={"kind": "wait"}), "schema", "/nodes/a", "a wait has either `event` or `flow`"),
        (flow(a={"kind": "flow", "flow": "f"}), "recursion", "/nodes/a/flow", "f → f"),
        (change("load", each={"kind": "flow", "flow": "nightly", "version": 7}), "recursion", "/nodes/load/each/flow", "nightly → nightly"),
        (change("load", parallel=0), "schema", "/nodes/load/parallel", "1"),
        (change("load", each=5), "schema", "/nodes/load/each", "object"),
        (change("load", each={"kind": "map"}), "schema", "/nodes/load/each/kind", '"task", "flow"'),
        (flow(**{"A b": TASK}), "schema", "/nodes", "begin with a small letter"),
        (flow(a=task("b")), "unknown_node", "/nodes/a/after/0", "no node 'b'"),
        (flow(alpha=TASK, b=task("alhpa")), "unknown_node", "/nodes/b/after/0", "did you mean 'alpha'"),
        (flow(a=TASK, b=task("a.big")), "not_a_switch", "/nodes/b/after/0", "write 'a' alone"),
        (flow(b=task("b")), "cycle", "/nodes/b/after/0", "b → b"),
        (change("list_files", after=["clean_up"]), "cycle", "/nodes/list_files/after/0", "list_files → load → report"),
        (flow(a=TASK, b=task("a", join={"k": 2})), "unreachable", "/nodes/b/join/k", "at most 1"),
        (change("load", k=3), "k_and_tolerate", "/nodes/load/tolerate", "remove `tolerate`"),
        (change("load", items="1 +"), "expression", "/nodes/load/items", "Syntax error"),
        (change("load", items="item.x"), "expression", "/nodes/load/items", "flow, inputs, nodes"),
        (change("load", items="5"), "expression_type", "/nodes/load/items", "INT; LIST is needed"),
        (change("approval", key="1 + 1"), "expression_type", "/nodes/approval/key", "STRING"),
        (change("report", input="[1]"), "expression_type", "/nodes/report/input", "MAP"),
        (change("clean_up", input="b'x'"), "expression_type", "/nodes/clean_up/input", "BYTES"),
        (change("size_of_report", cases=[{"case": "large", "when": "1"}]), "expression_type", "/nodes/size_of_report/cases/0/when", "BOOL"),
        (change("publish", input="nodes"), "whole_nodes", "/nodes/publish/input", "nodes.NAME"),
        (change("publish", input="nodes.gone.output"), "unknown_node", "/nodes/publish/input", "'gone'"),
        (change("publish", input="nodes.clean_up.output"), "not_an_ancestor", "/nodes/publish/input", "add it to `after`"),
        (change("publish", input="nodes.publish.output"), "not_an_ancestor", "/nodes/publish/input", "itself"),
        (change("publish", input="nodes.report.rows"), "unknown_field", "/nodes/publish/input", "nodes.report.output.rows"),
        (change("publish", input="flow.nope"), "unknown_field", "/nodes/publish/input", "id, name, version"),
        (change("publish", input="inputs.dya"), "unknown_input", "/nodes/publish/input", "declare it"),
    ],
)  # fmt: skip
def test_each_fault_has_its_code_its_place_and_advice(document, code, pointer, words):
    """One fault of a definition is one fault of its validation."""
    fault = only(document)
    assert (fault.code, fault.pointer) == (code, pointer)
    assert words in fault.message


def test_every_fault_is_found_at_once():
    """A part with a wrong shape hides no fault of another."""
    document = {
        "flow": "f",
        "version": 0,
        "nodes": {
            "a": {"kind": "task"},
            "b": task("a", "gone", input="nodes.c.output +"),
            "c": task("b", input="inputs.x"),
            "d": switch("a", cases=[{"case": "big"}]),
            "e": task("d.anything", "d.big", input="nodes.a.output"),
            "f": task("g"),
            "g": task("f"),
            "h": task("g"),
        },
    }
    assert sorted(found(document)) == sorted(
        [
            ("schema", "/version"),
            ("schema", "/nodes/a"),
            ("unknown_node", "/nodes/b/after/1"),
            ("expression", "/nodes/b/input"),
            ("unknown_input", "/nodes/c/input"),
            ("schema", "/nodes/d/cases/0"),
            ("cycle", "/nodes/f/after/0"),
            ("unreachable", "/nodes/h"),
        ]
    )


def test_cases_of_switches_are_known():
    """An edge leads from a case that exists, and a case has a name of its own."""
    sound = flow(s=switch(), a=task("s.big"), b=task("s.small"), c=task("s"))
    sound["inputs"] = {"n": {}}
    assert validate(sound) == []
    sound["nodes"]["d"] = task("s.bgi")
    assert found(sound) == [("unknown_case", "/nodes/d/after/0")]
    del sound["nodes"]["d"]
    sound["nodes"]["s"]["cases"] *= 2
    assert found(sound) == [("duplicate_case", "/nodes/s/cases/1/case")]
    sound["nodes"]["s"] = switch(**{"else": "big"})
    assert ("duplicate_case", "/nodes/s/else") in found(sound)


def test_cases_of_one_switch_count_once_for_k():
    """At most one case of a switch is taken."""
    document = flow(s=switch(), a=task("s.big", "s.small", join={"k": 2}))
    document["inputs"] = {"n": {}}
    assert found(document) == [("unreachable", "/nodes/a/join/k")]


def test_the_place_in_an_expression_is_told():
    """Line and column are those of the expression; the pointer is that of the field."""
    fault = only(change("publish", input="{\n  'a': inputs.day,\n  'b': nodes.gone.output}"))
    assert fault.expression_at == (3, 8)
    assert only(change("load", items="1 +")).expression_at == (1, 4)


def test_a_chain_of_a_thousand_nodes_is_validated():
    """The graph may be as deep as it is large."""
    chain = {f"n{i}": task(f"n{i - 1}") if i else TASK for i in range(1000)}
    assert validate(flow(**chain)) == []
    chain["n0"] = task("n999")
    assert only(flow(**chain)).message.count("→") == 1000


def test_types_are_checked_if_they_are_given():
    """Tasks of nodes and of items have registered types."""
    known = {"list-files", "publish-report"}
    assert sorted(found(EXAMPLE, types=known)) == [
        ("unknown_type", "/nodes/clean_up/type"),
        ("unknown_type", "/nodes/load/each/type"),
    ]
    assert validate(EXAMPLE, types=known | {"load-file", "delete-files"}) == []


def library(*definitions):
    newest = {}
    for definition in definitions:
        newest[definition["flow"], definition["version"]] = definition
        newest[definition["flow"], None] = definition
    return lambda name, version: newest.get((name, version))


def named(name, *children, version=1):
    nodes = {f"n{i}": {"kind": "flow", "flow": child} for i, child in enumerate(children)} or {"a": TASK}
    return {"flow": name, "version": version, "nodes": nodes}


def test_child_flows_are_checked_if_definitions_are_given():
    """A child flow exists in its version, and no definition contains itself."""
    leaf, middle = named("leaf"), named("middle", "leaf", "leaf")
    assert validate(named("top", "middle", "leaf"), definitions=library(leaf, middle)) == []
    assert only(named("top", "middle"), definitions=library(leaf)).code == "unknown_flow"
    other = {"flow": "top", "version": 1, "nodes": {"m": {"kind": "flow", "flow": "leaf", "version": 9}}}
    assert only(other, definitions=library(leaf)).pointer == "/nodes/m/flow"
    fault = only(named("top", "middle"), definitions=library(leaf, named("middle", "top")))
    assert (fault.code, fault.pointer) == ("recursion", "/nodes/n0/flow")
    assert "top → middle → top" in fault.message
    assert only(named("top", "top"), definitions=library()).code == "recursion"


def test_a_recursion_below_is_found_whatever_was_seen_before():
    """A definition that one branch has checked is not checked again by another."""
    chain = [named("a", "b", "d"), named("b", "c"), named("c", "b"), named("d")]
    codes = [fault.code for fault in validate(named("top", "d", "a", "d", "a"), definitions=library(*chain))]
    assert codes == ["recursion", "recursion"]


@pytest.mark.parametrize(("deep", "codes"), [(MAX_DEPTH - 1, []), (MAX_DEPTH, ["depth"]), (400, ["depth"])])
def test_child_flows_may_be_nested_a_hundred_deep(deep, codes):
    """Sub-flows in each other have a bound; equal children are looked at once."""
    chain = [named(f"f{i}", *[f"f{i + 1}"] * 3) for i in range(deep - 1)] + [named(f"f{deep - 1}")]
    faults = validate(named("top", "f0"), definitions=library(*chain))
    assert [fault.code for fault in faults] == codes
    reason = f"child flows are nested more than {MAX_DEPTH} deep: nest fewer"
    assert {fault.message for fault in faults} == ({reason} if codes else set())


def test_inputs_of_child_flows_are_those_that_it_declares():
    """A misspelt argument is found before the flow runs, if the arguments are written out."""
    child = {**named("child"), "inputs": {"day": {}, "region": {"default": "eu"}}}
    top = named("top", "child")
    top["inputs"] = {"day": {}}
    top["nodes"]["n0"]["input"] = "{'day': inputs.day, 'regoin': 'us'}"
    assert found(top, definitions=library(child)) == [("unknown_argument", "/nodes/n0/input")]
    top["nodes"]["n0"]["input"] = "{'region': 'us'}"
    fault = only(top, definitions=library(child))
    assert (fault.code, "'day'" in fault.message) == ("missing_argument", True)
    top["nodes"]["n0"]["input"] = "inputs"
    assert validate(top, definitions=library(child)) == []


# --- files ---


def test_faults_of_a_file_have_lines_and_columns():
    """F1: in the order of the file, at the value that is wrong or at the nearest around it."""
    text = b"""\
flow: f
version: 1
nodes:
  a:
    kind: task
    type: "bad type"
  b:
    kind: task
    type: t
    after: [a, gone]
    input: '1 +'
  b:
    kind: timer
"""
    _, faults = validate_text(text)
    assert [(fault.code, fault.line, fault.column) for fault in faults] == [
        ("schema", 6, 11),
        ("unknown_node", 10, 16),
        ("expression", 11, 12),
        ("duplicate_name", 12, 3),
    ]
    assert "first at 7:3" in faults[-1].message


@pytest.mark.parametrize(
    ("data", "words", "place"),
    [
        (b"", "empty", (0, 0)),
        (b"\xff\xfe", "byte 0 is not UTF-8", (0, 0)),
        (b"a: [", "not YAML", (1, 5)),
        (b"a: 1\nb: [1, 2\nc: 3", "not YAML", (3, 2)),
        (b"a: 1\n---\nb: 2", "expected a single document", (2, 1)),
        (b"a: &x [1]\nb: *x", "aliases are not supported", (1, 4)),
        (b"a: 99999999999999999999", "more than 64 bits", (1, 4)),
        (b"a: 1e999", "too large", (1, 4)),
        (b'a: "\\ud800"', "surrogate", (1, 4)),
        (b'a: "\\0"', "NUL", (1, 4)),
        (b"a: !!python/object:os.system {}", "tag", (1, 4)),
        (b"a: !!timestamp 2026-11-23", "tag", (1, 4)),
        (b"? [1]\n: 2", "name of a field", (1, 3)),
        (b"[" * 300 + b"]" * 300, "nested deeper than 100", (1, 102)),
        (b"[" * 100_000, "nested deeper than 100", (0, 0)),
        (b"a" * (MAX_BYTES + 1), "4,194,304 is the limit", (0, 0)),
        (b"@", "not YAML", (1, 1)),
        (b"a: b\nc: \x07", "U+0007", (2, 4)),
    ],
)
def test_a_text_that_cannot_be_read_has_its_reason(data, words, place):
    """T5: the error says where and what."""
    fault = load(data).faults[0]
    assert (fault.code, (fault.line, fault.column)) == ("text", place)
    assert words in fault.message


def test_yaml_has_the_types_of_json():
    """Words and numbers that YAML 1.1 would convert stay what they look like."""
    text = b"a: on\nb: 1:30\nc: 2026-11-23\nd: 0x1f\ne: 007\nf: ~\ng:\nh: 1.5e3\ni: -7\nj: true\nk: 1_000\n=: 5\n<<: 6\n"
    assert load(text).document == {
        "a": "on",
        "b": "1:30",
        "c": "2026-11-23",
        "d": "0x1f",
        "e": "007",
        "f": None,
        "g": None,
        "h": 1500.0,
        "i": -7,
        "j": True,
        "k": "1_000",
        "=": 5,
        "<<": 6,
    }


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc\tä", max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_values, st.sampled_from([None, 2, "\t"]), st.booleans())
def test_json_is_read_as_it_is(value, indent, ascii_):
    """JSON files are read by the same reader, also with tabs."""
    text = json.dumps({"value": value}, indent=indent, ensure_ascii=ascii_)
    loaded = load(text.encode())
    assert loaded.faults == []
    assert loaded.document == {"value": value}


@settings(max_examples=100, deadline=None)
@given(
    json_values | st.fixed_dictionaries({"flow": json_values, "version": json_values, "nodes": json_values})
)
def test_any_document_is_validated(document):
    """Hostile documents have faults, and raise nothing."""
    faults = validate(document)
    assert faults
    assert {fault.code for fault in faults} <= CODES.keys()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_definition_with_any_part_replaced_is_validated(data):
    """With any value at any place, each fault has a pointer to a part of the document."""
    document = copy.deepcopy(EXAMPLE)
    part, key = None, None
    target = document
    while (
        isinstance(target, dict | list) and target and not data.draw(st.integers(0, 0 if part is None else 3))
    ):
        keys = sorted(target) if isinstance(target, dict) else range(len(target))
        part, key = target, data.draw(st.sampled_from(keys))
        target = part[key]
    part[key] = data.draw(json_values)
    for fault in validate(document):
        assert fault.message
        value = document
        for name in re.findall("/([^/]*)", fault.pointer):
            value = value[
                int(name) if isinstance(value, list) else name.replace("~1", "/").replace("~0", "~")
            ]


def test_faults_as_json():
    """The places are absent where they are not known."""
    assert Fault("schema", "", "x").to_wire() == {"code": "schema", "pointer": "", "detail": "x"}
    assert Fault("expression", "/a", "x", 1, 2, (3, 4)).to_wire() == {
        "code": "expression",
        "pointer": "/a",
        "detail": "x",
        "line": 1,
        "column": 2,
        "expression_at": {"line": 3, "column": 4},
    }
