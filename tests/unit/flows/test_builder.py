"""The builder makes the JSON of the schema."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cel import compile_expression
from penstock.flows import INDEX, INPUTS, ITEM, Flow, FlowOf, TaskOf, cel
from penstock.flows.builder import to_cel
from penstock.flows.loading import load
from penstock.flows.validation import validate

EXAMPLE = Path(__file__).parents[3] / "schemas" / "flows" / "definition.example.yaml"


def nightly():
    flow = Flow(
        "nightly",
        version=1,
        description="Loads the files of one day, builds the report, and publishes it when it is approved.",
        on_failure="continue",
        timeout_s=28800,
    )
    day = flow.declare("day", description="The day as YYYY-MM-DD.")
    region = flow.declare("region", default="eu")
    files = flow.task(
        "list_files", type="list-files", input={"day": day, "region": region}, start_within_s=600
    )
    load_file = TaskOf("load-file", input={"file": ITEM, "position": INDEX})
    loaded = flow.map(
        "load", after=[files], items=files.output["files"], parallel=50, tolerate=3, each=load_file
    )
    report = flow.flow(
        "report",
        flow="build-report",
        version=2,
        after=[loaded],
        input={"day": INPUTS["day"], "files": cel(f"size({loaded.output})")},
        finish_within_s=7200,
        warn_after_s=3600,
    )
    size = flow.switch(
        "size_of_report",
        after=[report],
        cases={"large": cel(f"{report.output['rows']} > 1000000")},
        otherwise="small",
    )
    approval = flow.wait(
        "approval", after=[size["large"]], event="report.approved", key=day, finish_within_s=14400
    )
    publish = flow.task(
        "publish", type="publish-report", after=[size["small"], approval], join="any", input=report.output
    )
    cool_down = flow.timer("cool_down", after=[loaded], join="all_done", delay_s=60)
    flow.task(
        "clean_up", type="delete-files", after=[publish, cool_down], join="all_done", input={"day": day}
    )
    flow.output({"published": cel(f'{publish.status} == "succeeded"')})
    return flow


def test_an_input_is_declared_once():
    """F1: a second declaration would drop the default of the first one."""
    flow = Flow("f", version=1)
    flow.declare("day", default=1)
    with pytest.raises(ValueError, match="'day' already"):
        flow.declare("day")


def test_the_builder_makes_what_the_file_says():
    """F1: the example in Python is the example in YAML."""
    assert nightly().definition() == load(EXAMPLE.read_bytes()).document


def test_every_field_is_valid():
    """Each parameter of each method becomes a field of the schema."""
    flow = Flow("all", version=2, warn_after_s=5)
    task = flow.task(
        "t",
        type="x",
        stage="s",
        priority="HIGH",
        key="tenant",
        start_within_s=1,
        finish_within_s=2.5,
        warn_after_s=3,
    )
    flow.timer("u", until=cel('timestamp("2026-11-23T00:00:00Z")'), after=[task], join={"k": 1})
    flow.map("m", items=[1, 2], k=1, each=FlowOf("child", version=1, input={"n": ITEM}), warn_after_s=1)
    flow.wait_for_run("w", flow="other", after=[task], finish_within_s=60)
    definition = flow.definition()
    assert validate(definition) == []
    assert definition["nodes"]["w"] == {
        "kind": "wait",
        "flow": "other",
        "tick": "same",
        "after": ["t"],
        "finish_within_s": 60,
    }
    assert definition["nodes"]["t"]["key"] == '"tenant"'
    json.dumps(definition)


def test_a_name_is_used_once():
    """A second node of a name would replace the first."""
    flow = Flow("f", version=1)
    flow.task("a", type="x")
    with pytest.raises(ValueError, match="already"):
        flow.task("a", type="y")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), TypeError),
        ({1: 2}, TypeError),
        ({"a": {1, 2}}, TypeError),
        (2**64, ValueError),
        (float("nan"), ValueError),
    ],
)
def test_data_that_is_not_json_is_refused(value, error):
    """The error comes where the flow is written."""
    with pytest.raises(error):
        to_cel(value)


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
)


@given(
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(leaves.filter(lambda x: isinstance(x, str)), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_data_is_the_value_of_its_expression(value):
    """The expression of a JSON value evaluates to this value."""
    found = compile_expression(to_cel(value), frozenset()).evaluate({})
    assert found == value
    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_any_field_can_be_selected(name):
    """Names that are no identifiers are selected by an index."""
    expression = compile_expression(str(INPUTS[name]), frozenset({"inputs"}))
    assert expression.evaluate({"inputs": {name: 7}}) == 7
