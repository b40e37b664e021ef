"""The description of the API: the standard, the routes, the message schemas and the examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from openapi_spec_validator import validate

from penstock.contracts.files import schemas_folder
from penstock.core.flow.operations import FlowVerb
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, NodeStatus
from penstock.core.flow.why import COUNTED as FLOW_CHANGES_COUNTED
from penstock.core.flow.why import FlowReason
from penstock.core.operations import BATCH_SIZE, Verb
from penstock.core.task import Priority, State
from penstock.core.why import COUNTED as AHEAD_COUNTED
from penstock.core.why import WaitReason
from penstock.gateway import openapi
from penstock.gateway.api_keys import ApiKeyRoutes
from penstock.gateway.api_reference import render
from penstock.gateway.backfills import BackfillRoutes
from penstock.gateway.callback_secrets import CallbackSecretRoutes
from penstock.gateway.callbacks import MAX_REPLAYED, CallbackRoutes
from penstock.gateway.concurrency_keys import ConcurrencyKeyRoutes
from penstock.gateway.console import ConsoleRoutes
from penstock.gateway.dry_run import MAX_COUNTED
from penstock.gateway.flow_definitions import FlowDefinitionRoutes
from penstock.gateway.flow_operations import FlowCommandRoutes
from penstock.gateway.flow_views import FlowViewRoutes
from penstock.gateway.hold import WorkerRoutes
from penstock.gateway.hold_answers import UnconfirmedTasks
from penstock.gateway.live import LiveRoutes
from penstock.gateway.log_reports import LogReportRoutes
from penstock.gateway.operations import MAX_ROWS_EXAMINED, VERBS, OperationRoutes
from penstock.gateway.operations import STATES as OPERATION_STATES
from penstock.gateway.overview import OverviewRoutes
from penstock.gateway.pages import PageRoutes
from penstock.gateway.paging import MAX_PAGE_SIZE
from penstock.gateway.schedules import ScheduleRoutes
from penstock.gateway.session_routes import SessionRoutes
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submissions import SubmissionRoutes
from penstock.gateway.targets import MAX_PAGE_SIZE as MAX_TARGET_PAGE_SIZE
from penstock.gateway.targets import MAX_URL_LENGTH, TargetRoutes
from penstock.gateway.task_logs import MAX_LINES, TaskLogRoutes
from penstock.gateway.task_reruns import TaskRerunRoutes
from penstock.gateway.tasks import TaskRoutes
from penstock.gateway.types import TypeRoutes
from penstock.gateway.why import MAX_PAGE_SIZE as MAX_BACKLOG_PAGE_SIZE
from penstock.gateway.why import PAGE_SIZE as BACKLOG_PAGE_SIZE
from penstock.gateway.why import BacklogRoutes
from penstock.gateway.workers import MAX_PAGE_SIZE as MAX_WORKERS_PAGE_SIZE
from penstock.gateway.workers import ListWorkersRoutes
from penstock.http.preferences import LONGEST_WAIT_S
from penstock.http.problems import KINDS, MAX_ERRORS_SHOWN
from penstock.postgres.flow_views import CHILDREN_PER_PART
from penstock.postgres.replay import HELD_COUNTED, PENDING_SEARCHED

SHARED = openapi.read_part("shared")
PARTS = {tag["name"]: openapi.read_part(tag["name"]) for tag in SHARED["tags"]}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in openapi.document()["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def test_the_description_is_openapi_3_1() -> None:
    """O14: a validator of the standard accepts the description."""
    assert openapi.document()["openapi"] == "3.1.0"
    validate(openapi.document())


def test_each_tag_has_one_file_with_its_paths_and_what_only_they_use() -> None:
    """O14: the joined description has every part once, and each part stands where it is used."""
    files = {file.stem for file in (schemas_folder() / "http" / "openapi").iterdir()}
    assert files == {"shared", *(name.lower().replace(" ", "-") for name in PARTS)}
    for name, part in PARTS.items():
        found = [tag for item in part["paths"].values() for each in item.values() for tag in each["tags"]]
        assert set(found) == {name}
    all_parts = [SHARED, *PARTS.values()]
    defined = [
        (kind, name) for part in all_parts for kind, of_kind in part["components"].items() for name in of_kind
    ]
    paths = [path for part in PARTS.values() for path in part["paths"]]
    api = openapi.document()
    assert len(set(paths)) == len(paths) == len(api["paths"])
    assert len(set(defined)) == len(defined)
    assert set(defined) == {(kind, name) for kind, of_kind in api["components"].items() for name in of_kind}
    users: dict[tuple[str, str], set[str]] = {found: set() for found in defined}
    for tag, part in PARTS.items():
        for found in _used(part["paths"], api["components"]):
            users[found].add(tag)
    for kind, name in defined:
        if kind == "securitySchemes":
            continue  # named by `security` and not by a reference
        (home,) = [tag for tag, part in PARTS.items() if name in part["components"].get(kind, ())] or [None]
        assert (users[kind, name] == {home}) if home else (len(users[kind, name]) > 1), name


def _used(node: Any, components: dict[str, Any]) -> set[tuple[str, str]]:
    """The components that a part of the description refers to, directly or not."""
    found: set[tuple[str, str]] = set()
    remaining = [node]
    while remaining:
        for reference in re.findall(r'"#/components/(\w+)/([^/"]+)', json.dumps(remaining.pop())):
            if reference not in found:
                found.add(reference)
                remaining.append(components[reference[0]][reference[1]])
    return found


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    """O14: the router and the description have the same routes."""
    nothing: Any = None
    settings = GatewaySettings.load({})
    routes = [
        *SubmissionRoutes(settings, nothing, nothing, nothing, nothing, nothing).routes(),
        *TaskRoutes(settings, nothing, nothing, nothing, nothing).routes(),
        *TaskRerunRoutes(nothing, nothing, nothing).routes(),
        *TypeRoutes(settings, nothing, nothing).routes(),
        *ConcurrencyKeyRoutes(nothing).routes(),
        *BacklogRoutes(nothing, nothing).routes(),
        *FlowDefinitionRoutes(settings, nothing, nothing, nothing).routes(),
        *TargetRoutes(nothing, nothing).routes(),
        *CallbackSecretRoutes(settings, nothing, nothing).routes(),
        *CallbackRoutes(nothing).routes(),
        *OperationRoutes(settings, nothing, nothing, nothing).routes(),
        *FlowViewRoutes(nothing, nothing, nothing, nothing).routes(),
        *FlowCommandRoutes(nothing, nothing).routes(),
        *ScheduleRoutes(nothing, nothing, nothing).routes(),
        *BackfillRoutes(nothing).routes(),
        *TaskLogRoutes(nothing, nothing).routes(),
        *LogReportRoutes(settings, nothing).routes(),
        *WorkerRoutes(settings, nothing, nothing, nothing, nothing, UnconfirmedTasks()).routes(),
        *ListWorkersRoutes(settings, nothing, nothing, nothing).routes(),
        *OverviewRoutes(nothing, nothing, nothing, {}, show_reasons=False).routes(),
        *LiveRoutes(nothing, nothing, nothing).routes(),
        *SessionRoutes(nothing, nothing, nothing).routes(),
        *ApiKeyRoutes(nothing).routes(),
        *ConsoleRoutes(None).routes(),
        *PageRoutes(nothing, nothing, nothing).routes(),
    ]
    # The pattern behind a parameter's name is the router's business.
    served = {(route.method, re.sub(r":[^}]+", "", route.path)) for route in routes}
    assert len(served) == len(routes)
    assert all(isinstance(route, web.RouteDef) for route in routes)
    assert {(method, path) for method, path, _ in operations()} == served


@pytest.mark.parametrize(
    ("name", "message", "inside"),
    [
        ("Submission", "submitted", []),
        ("TaskType", "task-type", []),
        ("FlowSubmission", "flows-submitted", []),
        ("ReadyTask", "ready", []),
        ("StageResult", "stage-results", ["$defs", "result"]),
        ("LogRecord", "task-logs", []),
    ],
)
def test_message_schemas_are_referred_to_and_never_copied(name: str, message: str, inside: list[str]) -> None:
    """T5, T6: HTTP and Kafka validate documents by the same schema."""
    (source,) = (
        part["components"]["schemas"][name]
        for part in (SHARED, *PARTS.values())
        if name in part["components"]["schemas"]
    )
    assert list(source) == ["$ref"]
    schema = json.loads((schemas_folder() / "messages" / f"{message}.schema.json").read_text())
    for part in inside:
        schema = schema[part]
    served = openapi.document()["components"]["schemas"][name]
    assert served == {key: value for key, value in schema.items() if key not in ("$schema", "$id")}


def test_events_have_the_fields_of_their_topic() -> None:
    """F4: an event over HTTP and a record of the topic differ in the name alone."""
    schema = json.loads((schemas_folder() / "messages" / "flow-events-submitted.schema.json").read_text())
    del schema["properties"]["event"]
    assert (
        openapi.document()["components"]["schemas"]["EventSubmission"]["properties"] == schema["properties"]
    )


def test_no_reference_leaves_the_served_description() -> None:
    """All references are internal, so a client needs no other file."""
    assert "/messages/" not in openapi.encoded().decode()
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
    """Each example conforms to its schema."""
    whole = {**schema, "components": openapi.document()["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def test_every_body_has_an_example() -> None:
    """Every request body, and every response with a document, has an example."""
    without = [
        where
        for where, found in media()
        if not found.get("examples") and found["schema"].get("$ref", "") != "#/components/schemas/Problem"
    ]
    assert without == [
        "GET /console 200",
        "GET /console/{path} 200",
        "GET / 200",
        "GET /docs 200",
        "GET /openapi.json 200",
    ]


def test_words_and_limits_are_those_of_the_code() -> None:
    """The description has the states, priorities, problems and limits of the code."""
    schemas = openapi.document()["components"]["schemas"]
    assert schemas["Task"]["properties"]["state"]["enum"] == [state.value for state in State]
    assert schemas["Task"]["properties"]["priority"]["enum"] == [priority.name for priority in Priority]
    for kind in KINDS:
        assert f"`{kind.name}`" in schemas["Problem"]["description"]
    assert f"{MAX_ERRORS_SHOWN} at most" in schemas["Problem"]["properties"]["errors"]["description"]
    limits = {
        path: p["schema"]["maximum"]
        for _, path, op in operations()
        for p in op.get("parameters", ())
        if p.get("name") == "limit"
    }
    longest = openapi.document()["components"]["parameters"]["Prefer"]["description"]
    assert f"; {LONGEST_WAIT_S} is the most" in longest
    assert limits == {
        "/tasks": MAX_PAGE_SIZE,
        "/tasks/{id}/logs/{step}/{attempt}": MAX_LINES,
        "/targets": MAX_TARGET_PAGE_SIZE,
        "/targets/secrets": MAX_PAGE_SIZE,
        "/callbacks": MAX_PAGE_SIZE,
        "/operations": MAX_PAGE_SIZE,
        "/flows": MAX_PAGE_SIZE,
        "/flows/{id}/nodes/{node}": MAX_PAGE_SIZE,
        "/schedules": MAX_PAGE_SIZE,
        "/schedules/{name}/skips": MAX_PAGE_SIZE,
        "/schedules/{name}/history": MAX_PAGE_SIZE,
        "/backfills": MAX_PAGE_SIZE,
        "/types/{name}/keys": MAX_PAGE_SIZE,
        "/audit": MAX_PAGE_SIZE,
        "/flow-definitions": MAX_PAGE_SIZE,
        "/flow-definitions/{name}": MAX_PAGE_SIZE,
        "/backlog": MAX_BACKLOG_PAGE_SIZE,
        "/workers": MAX_WORKERS_PAGE_SIZE,
    }
    assert schemas["FlowStep"]["properties"]["reason"]["enum"] == list(FlowReason)
    assert schemas["FlowFigures"]["properties"]["unapplied"]["maximum"] == FLOW_CHANGES_COUNTED
    assert schemas["FlowSummary"]["properties"]["status"]["enum"] == list(FlowStatus)
    assert schemas["FlowNode"]["properties"]["status"]["enum"] == list(NodeStatus)
    assert schemas["FlowNode"]["properties"]["kind"]["enum"] == list(NodeKind)
    node = openapi.document()["paths"]["/flows/{id}/nodes/{node}"]["get"]["description"]
    assert f"examines {CHILDREN_PER_PART:,} children" in node
    assert schemas["Why"]["properties"]["reason"]["enum"] == list(WaitReason)
    assert schemas["Why"]["properties"]["state"]["enum"] == [state.value for state in State]
    assert schemas["Figures"]["properties"]["ahead"]["maximum"] == AHEAD_COUNTED
    assert schemas["BacklogLine"]["properties"]["priority"]["enum"] == [
        priority.name for priority in Priority
    ]
    backlog_page = openapi.document()["paths"]["/backlog"]["get"]["parameters"][1]["schema"]
    assert backlog_page["default"] == BACKLOG_PAGE_SIZE
    asked = schemas["OperationRequest"]["properties"]
    assert asked["verb"]["enum"] == [*Verb]
    assert schemas["Operation"]["properties"]["verb"]["enum"] == list(VERBS)
    assert schemas["FlowOperationRequest"]["properties"]["verb"]["enum"] == [*FlowVerb]
    assert schemas["Operation"]["properties"]["state"]["enum"] == list(OPERATION_STATES)
    assert f"up to {MAX_COUNTED:,} among the first {MAX_ROWS_EXAMINED:,}" in asked["dry_run"]["description"]
    begin = openapi.document()["paths"]["/operations"]["post"]["description"]
    assert f"at most {BATCH_SIZE:,} tasks" in begin
    replay = schemas["ReplayRequest"]["properties"]
    assert replay["limit"]["maximum"] == replay["limit"]["default"] == MAX_REPLAYED
    assert f"up to {MAX_COUNTED:,}" in replay["dry_run"]["description"]
    assert schemas["TargetEnable"]["properties"]["url"]["maxLength"] == MAX_URL_LENGTH
    backlog = schemas["Backlog"]["properties"]["complete"]["description"]
    assert f"first {PENDING_SEARCHED:,}" in backlog
    assert f"up to {HELD_COUNTED:,}" in backlog
    assert schemas["SetRequest"]["properties"]["results"]["maxItems"] == GatewaySettings().gateway_batch_limit


def test_the_page_shows_every_operation_and_schema() -> None:
    """O14: the page has every route, and loads nothing from other sites."""
    page = render()
    for _, _, operation in operations():
        assert f'id="{operation["operationId"]}"' in page
    for name in openapi.document()["components"]["schemas"]:
        assert f'id="schema-{name}"' in page
    assert "<script" not in page
    assert "http://" not in page.replace("http(s)", "")
