"""`penstock flows`: definitions in files, without a server."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.flow_files import children_first
from penstock.cli.main import cli

EXAMPLE = Path(__file__).parents[3] / "schemas" / "flows" / "definition.example.yaml"
PARENT = "flow: parent\nversion: 1\nnodes:\n  c: {kind: flow, flow: child}\n"
CHILD = "flow: child\nversion: 2\ninputs:\n  day: {}\nnodes:\n  a: {kind: task, type: t}\n"
NAME_ONE = "write the name of a node of this definition"
AT = "at 1:15 of the expression"


def run(*arguments):
    return CliRunner().invoke(cli, ["flows", *map(str, arguments)])


def test_a_valid_definition():
    """The status is 0, and the output says what the file has."""
    result = run("validate", EXAMPLE)
    assert (result.exit_code, result.output) == (
        0,
        f"{EXAMPLE}: flow nightly, version 1 is valid: 8 nodes; not checked: types of tasks and child flows\n",
    )


def test_every_fault_is_printed_with_its_place(tmp_path):
    """O8: people get lines that editors can follow, programs JSON; the status is 3."""
    file = tmp_path / "bad.yaml"
    file.write_text(
        "flow: f\nversion: 1\nnodes:\n  a: {kind: task}\n  b:\n    kind: map\n    after: [c]\n"
        "    items: inputs.files +\n    each: {kind: task, type: t}\n"
    )
    result = run("validate", file)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        f"{file}:4:6: schema: a task needs the field 'type': add it (/nodes/a)",
        f"{file}:7:13: unknown_node: there is no node 'c': {NAME_ONE} (/nodes/b/after/0)",
        f"{file}:8:12: expression: Syntax error: mismatched input '<EOF>' (/nodes/b/items {AT})",
    ]
    result = run("validate", file, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert (document["file"], document["valid"]) == (str(file), False)
    assert [error["code"] for error in document["errors"]] == ["schema", "unknown_node", "expression"]
    assert document["errors"][2]["expression_at"] == {"line": 1, "column": 15}


def test_brackets_in_a_message_are_printed(tmp_path):
    """Text of the file is no markup."""
    file = tmp_path / "bad.yaml"
    file.write_text("flow: f\nversion: 1\nnodes:\n  a: {kind: task, type: '[bold]'}\n")
    assert "[bold]" in run("validate", file).stdout


def test_the_sdk_alone_names_what_is_missing(monkeypatch):
    """O8: the verb is shown, and its error has the command that installs the rest."""
    monkeypatch.setitem(sys.modules, "penstock.flows.validation", None)
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    for name in [name for name in sys.modules if name.startswith(("penstock.flows.", "penstock.cel"))]:
        monkeypatch.delitem(sys.modules, name)
    result = run("validate", EXAMPLE)
    assert result.exit_code == 6
    assert "pip install 'penstock[flows]'" in result.stderr


def test_types_are_checked_on_request(tmp_path):
    """Without a server the command line names the types."""
    file = tmp_path / "f.yaml"
    file.write_text("flow: f\nversion: 1\nnodes:\n  a: {kind: task, type: t}\n")
    assert run("validate", file, "--type", "t", "--type", "u").exit_code == 0
    result = run("validate", file, "--type", "u")
    assert (result.exit_code, "unknown_type" in result.stdout) == (3, True)


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        ([PARENT], None),
        ([PARENT, CHILD], "missing_argument"),
        ([PARENT, CHILD.replace("  day: {}", "  day: {default: 1}")], None),
        ([PARENT, CHILD.replace("flow: child", "flow: other")], "unknown_flow"),
        ([PARENT, PARENT.replace("child", "parent").replace("flow: parent", "flow: child", 1)], "recursion"),
        ([PARENT, "nodes: 5"], "unknown_flow"),
    ],
)
def test_child_flows_are_looked_up_among_the_files(tmp_path, texts, code):
    """Several files are validated together."""
    files = []
    for position, text in enumerate(texts):
        files.append(tmp_path / f"{position}.yaml")
        files[-1].write_text(text)
    first = json.loads(run("validate", *files, "--json").stdout.splitlines()[0])
    assert [error["code"] for error in first["errors"]] == ([] if code is None else [code])


@pytest.mark.parametrize("child", ["parent", "child"])
def test_one_file_must_not_contain_itself(tmp_path, child):
    """F1: such a flow would start itself without end. Other child flows may be at a gateway."""
    file = tmp_path / "parent.yaml"
    file.write_text(PARENT.replace("flow: child", f"flow: {child}"))
    result = run("validate", file)
    assert (result.exit_code, "parent → parent" in result.stdout) == (
        (3, True) if child == "parent" else (0, False)
    )


def test_one_node_is_singular(tmp_path):
    """O8: the output is a sentence."""
    file = tmp_path / "f.yaml"
    file.write_text("flow: f\nversion: 1\nnodes:\n  a: {kind: task, type: t}\n")
    assert run("validate", file).stdout.endswith("is valid: 1 node; not checked: types of tasks\n")


def test_definitions_are_ordered_by_their_child_flows():
    """F1: a gateway refuses a definition while a child flow is missing; newest versions count."""

    def definition(name, version, *children):
        nodes = {f"n{index}": {"kind": "flow", "flow": child} for index, child in enumerate(children)}
        return {"flow": name, "version": version, "nodes": nodes}

    given = {
        "a": definition("a", 1, "b", "c"),
        "d": definition("d", 1, "elsewhere"),
        "c2": definition("c", 2),
        "b": definition("b", 3, "c"),
        "c1": definition("c", 1),
    }
    order = [file for file, _ in children_first(given)]
    assert sorted(order) == sorted(given)
    assert order.index("c1") < order.index("c2") < order.index("b") < order.index("a")


def test_the_graph_has_the_nodes_in_an_order_of_running():
    """Each node follows everything that it depends on."""
    result = run("graph", EXAMPLE)
    assert result.exit_code == 0
    head, _, *rows = result.stdout.splitlines()
    assert head == "flow nightly, version 1, on_failure continue"
    names = [row.split()[1] for row in rows]
    assert names[0] == "list_files"
    assert names[-1] == "clean_up"
    assert "task load-file for each item, 50 at a time, 3 may fail" in rows[1]
    assert "after any of size_of_report.small, approval" in result.stdout
    documents = [json.loads(line) for line in run("graph", EXAMPLE, "--json").stdout.splitlines()]
    assert [document["level"] for document in documents] == [1, 2, 3, 3, 4, 5, 6, 7]


def test_the_graph_as_a_picture():
    """O8: the picture goes to standard output."""
    result = run("graph", EXAMPLE, "--svg")
    assert result.exit_code == 0
    assert result.stdout.startswith("<svg ")
    assert result.stdout.endswith("</svg>\n")


def test_a_graph_of_an_invalid_definition_names_the_first_fault(tmp_path):
    """The status is 3, and the error names the command that prints the others."""
    file = tmp_path / "cycle.yaml"
    file.write_text("flow: f\nversion: 1\nnodes:\n  a: {kind: task, type: t, after: [a]}\n")
    result = run("graph", file)
    assert result.exit_code == 3
    assert "a cycle: a → a" in result.stderr
    assert "penstock flows validate" in result.stderr


def test_a_missing_file_is_an_error_of_the_command_line():
    """The status is that of a wrong command line."""
    assert run("validate", "nowhere.yaml").exit_code == 2


ASSUMPTIONS = EXAMPLE.with_name("assumptions.example.yaml")


def test_a_simulation_prints_times_critical_path_and_slots():
    """F1: the example with its assumptions."""
    result = run("simulate", EXAMPLE, "--assume", ASSUMPTIONS)
    assert result.exit_code == 0
    assert "critical path: list_files → load → report → size_of_report → approval → publish" in result.stdout
    assert "slots: 50 tasks at the same time" in result.stdout
    assert "succeeded after 4,527 s" in result.stdout
    document = json.loads(run("simulate", EXAMPLE, "--assume", ASSUMPTIONS, "--json").stdout)
    assert (document["state"], document["takes_s"], document["slots"]) == ("succeeded", 4527.0, 50)
    assert document["nodes"][0] == {
        "node": "list_files",
        "state": "succeeded",
        "started_s": 0.0,
        "ended_s": 5.0,
    }


def test_a_simulation_without_assumptions_takes_the_defaults():
    """A second for each task, the else of each switch, one item."""
    document = json.loads(run("simulate", EXAMPLE, "--json").stdout)
    states = {node["node"]: node["state"] for node in document["nodes"]}
    assert (document["state"], states["approval"], document["slots"]) == ("succeeded", "skipped", 1)


def test_a_simulated_failure_has_a_status(tmp_path):
    """The status is 1, for use in CI."""
    file = tmp_path / "assume.yaml"
    file.write_text("nodes: {publish: {ends: failed}}")
    result = run("simulate", EXAMPLE, "--assume", file)
    assert (result.exit_code, "failed after" in result.stdout) == (1, True)


def test_faults_of_assumptions_have_their_place(tmp_path):
    """The status is 3, and each fault has a line."""
    file = tmp_path / "assume.yaml"
    file.write_text(
        "nodes:\n  gone: {}\n  report: {items: 5}\n  size_of_report: {case: huge}\n  load: {case: x}\n"
    )
    result = run("simulate", EXAMPLE, "--assume", file)
    assert result.exit_code == 3
    places = [line.split(": ")[0].removeprefix(str(file)) for line in result.stdout.splitlines()]
    assert places == [":2:9", ":3:19", ":4:26", ":5:16"]
    file.write_text("takes_s: -1\nnodes: {report: {end: failed}}")
    document = json.loads(run("simulate", EXAMPLE, "--assume", file, "--json").stdout)
    assert [error["pointer"] for error in document["errors"]] == ["/takes_s", "/nodes/report"]
