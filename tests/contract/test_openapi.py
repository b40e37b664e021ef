"""The API's description against the standard, the routes, the message schemas and its own examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from openapi_spec_validator import validate

from penstock.contracts.files import schemas_folder
from penstock.core.operations import AT_A_TIME, Verb
from penstock.core.task import Priority, State
from penstock.core.why import COUNTED as AHEAD_COUNTED
from penstock.core.why import Reason
from penstock.gateway import openapi
from penstock.gateway.callbacks import LARGEST_PAGE as LARGEST_CALLBACK_PAGE
from penstock.gateway.callbacks import REPLAYED, Callbacks
from penstock.gateway.hold import Hold
from penstock.gateway.keys import LARGEST_PAGE as LARGEST_KEY_PAGE
from penstock.gateway.keys import Keys
from penstock.gateway.operations import LARGEST_PAGE as LARGEST_OPERATION_PAGE
from penstock.gateway.operations import LOOKED_AT, Operations
from penstock.gateway.operations import STATES as OPERATION_STATES
from penstock.gateway.pages import Pages
from penstock.gateway.reference import render
from penstock.gateway.rehearsal import COUNTED
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.targets import LARGEST_PAGE as LARGEST_TARGET_PAGE
from penstock.gateway.targets import LONGEST_URL, Targets
from penstock.gateway.tasks import LARGEST_PAGE, Tasks
from penstock.gateway.types import Types
from penstock.gateway.waiting import LARGEST_PAGE as LARGEST_BACKLOG_PAGE
from penstock.gateway.waiting import PAGE as BACKLOG_PAGE
from penstock.gateway.waiting import Waiting
from penstock.http.problems import ERRORS_SHOWN, KINDS
from penstock.postgres.replay import HELD_COUNTED, PENDING_LOOKED_AT

SOURCE = json.loads((schemas_folder() / "http" / "openapi.json").read_text())


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in openapi.document()["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def test_the_description_is_openapi_3_1() -> None:
    """Issue 1: a validator that knows the standard takes what is served."""
    assert openapi.document()["openapi"] == "3.1.0"
    validate(openapi.document())


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    """Habit 8: neither side has anything the other has not."""
    nothing: Any = None
    settings = GatewaySettings.load({})
    routes = [
        *Tasks(settings, nothing, nothing, nothing, nothing, nothing).routes(),
        *Types(settings, nothing, nothing).routes(),
        *Keys(settings, nothing).routes(),
        *Waiting(settings, nothing).routes(),
        *Targets(settings, nothing, nothing).routes(),
        *Callbacks(settings, nothing).routes(),
        *Operations(settings, nothing, nothing).routes(),
        *Hold(settings, nothing, nothing, nothing, nothing).routes(),
        *Pages(nothing, nothing).routes(),
    ]
    # The pattern behind a parameter's name is the router's business.
    served = {(route.method, route.path.replace(":[0-9]+", "")) for route in routes}
    assert len(served) == len(routes)
    assert all(isinstance(route, web.RouteDef) for route in routes)
    assert {(method, path) for method, path, _ in operations()} == served


@pytest.mark.parametrize(
    ("name", "message", "inside"),
    [
        ("Submission", "submitted", []),
        ("TaskType", "task-type", []),
        ("ReadyTask", "ready", []),
        ("StageResult", "stage-results", ["$defs", "result"]),
    ],
)
def test_message_schemas_are_referred_to_and_never_copied(name: str, message: str, inside: list[str]) -> None:
    """T5, T6: HTTP and Kafka take the same documents, by the same file."""
    assert list(SOURCE["components"]["schemas"][name]) == ["$ref"]
    schema = json.loads((schemas_folder() / "messages" / f"{message}.schema.json").read_text())
    for part in inside:
        schema = schema[part]
    served = openapi.document()["components"]["schemas"][name]
    assert served == {key: value for key, value in schema.items() if key not in ("$schema", "$id")}


def test_no_reference_leaves_the_served_description() -> None:
    """A client that has the document has all of it."""
    assert "../messages" not in openapi.encoded().decode()
    assert openapi.encoded().decode().count('"$ref": "#/components/') == openapi.encoded().decode().count(
        '"$ref"'
    )


def media() -> Iterator[tuple[str, dict[str, Any]]]:
    for method, path, operation in operations():
        if "requestBody" in operation:
            yield f"{method} {path} body", operation["requestBody"]["content"]["application/json"]
        for status, answer in operation["responses"].items():
            for found in answer.get("content", {}).values():
                yield f"{method} {path} {status}", found
    for name, answer in openapi.document()["components"]["responses"].items():
        for found in answer["content"].values():
            yield name, found


EXAMPLES = [
    pytest.param(found["schema"], example["value"], id=f"{where}: {example['summary']}")
    for where, found in media()
    for example in found.get("examples", {}).values()
]


@pytest.mark.parametrize(("schema", "value"), EXAMPLES)
def test_examples_conform(schema: dict[str, Any], value: Any) -> None:
    """What readers copy works."""
    whole = {**schema, "components": openapi.document()["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def test_every_body_has_an_example() -> None:
    """Readers are shown every request, and every answer that is a document."""
    without = [
        where
        for where, found in media()
        if not found.get("examples") and found["schema"].get("$ref", "") != "#/components/schemas/Problem"
    ]
    assert without == ["GET / 200", "GET /docs 200", "GET /openapi.json 200"]


def test_words_and_limits_are_those_of_the_code() -> None:
    """States, priorities, problems and limits are written twice and must stay one."""
    schemas = openapi.document()["components"]["schemas"]
    assert schemas["Task"]["properties"]["state"]["enum"] == [state.value for state in State]
    assert schemas["Task"]["properties"]["priority"]["enum"] == [priority.name for priority in Priority]
    for kind in KINDS:
        assert f"`{kind.name}`" in schemas["Problem"]["description"]
    assert f"{ERRORS_SHOWN} at most" in schemas["Problem"]["properties"]["errors"]["description"]
    limits = {
        path: p["schema"]["maximum"]
        for _, path, op in operations()
        for p in op.get("parameters", ())
        if p["name"] == "limit"
    }
    assert limits == {
        "/tasks": LARGEST_PAGE,
        "/targets": LARGEST_TARGET_PAGE,
        "/callbacks": LARGEST_CALLBACK_PAGE,
        "/operations": LARGEST_OPERATION_PAGE,
        "/types/{name}/keys": LARGEST_KEY_PAGE,
        "/backlog": LARGEST_BACKLOG_PAGE,
    }
    assert schemas["Why"]["properties"]["reason"]["enum"] == list(Reason)
    assert schemas["Why"]["properties"]["state"]["enum"] == [state.value for state in State]
    assert schemas["Figures"]["properties"]["ahead"]["maximum"] == AHEAD_COUNTED
    assert schemas["BacklogLine"]["properties"]["priority"]["enum"] == [
        priority.name for priority in Priority
    ]
    backlog_page = openapi.document()["paths"]["/backlog"]["get"]["parameters"][1]["schema"]
    assert backlog_page["default"] == BACKLOG_PAGE
    asked = schemas["OperationRequest"]["properties"]
    assert asked["verb"]["enum"] == schemas["Operation"]["properties"]["verb"]["enum"] == [*Verb]
    assert schemas["Operation"]["properties"]["state"]["enum"] == list(OPERATION_STATES)
    assert f"up to {COUNTED:,} among the first {LOOKED_AT:,}" in asked["dry_run"]["description"]
    begin = openapi.document()["paths"]["/operations"]["post"]["description"]
    assert f"at most {AT_A_TIME:,} tasks" in begin
    replay = schemas["ReplayRequest"]["properties"]
    assert replay["limit"]["maximum"] == replay["limit"]["default"] == REPLAYED
    assert f"up to {COUNTED:,}" in replay["dry_run"]["description"]
    assert schemas["TargetEnable"]["properties"]["url"]["maxLength"] == LONGEST_URL
    backlog = schemas["Backlog"]["properties"]["complete"]["description"]
    assert f"first {PENDING_LOOKED_AT:,}" in backlog
    assert f"up to {HELD_COUNTED:,}" in backlog
    assert schemas["SetRequest"]["properties"]["results"]["maxItems"] == GatewaySettings().gateway_batch_limit


def test_the_page_shows_every_operation_and_schema() -> None:
    """Issue 1: a readable page, with nothing fetched from elsewhere."""
    page = render()
    for _, _, operation in operations():
        assert f'id="{operation["operationId"]}"' in page
    for name in openapi.document()["components"]["schemas"]:
        assert f'id="schema-{name}"' in page
    assert "<script" not in page
    assert "http://" not in page.replace("http(s)", "")
