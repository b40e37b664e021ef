"""Subscriptions of callbacks: their forms, refusals with pointers, hidden secrets, CloudEvents."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings import http
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts import inbound, subscription
from penstock.contracts.cloudevent import CONTENT_TYPE, envelope
from penstock.contracts.event import EVENTS, FINAL_EVENTS, TASK_EVENTS, Callback, Event
from penstock.contracts.files import schemas_folder
from penstock.contracts.submission import Submission
from penstock.contracts.subscription import MAX_HEADERS, MAX_HEADERS_BYTES, Format, Subscription
from penstock.contracts.validation import conform, problems
from penstock.core.target import TargetId
from penstock.errors import InvalidRecord, SettingsError
from penstock.postgres.types import TaskType
from penstock.settings import Platform

URL = "https://shop.example/hooks"
SECRET = "s3cr3t"
WHOLE = {
    "url": URL,
    "events": ["task.failed", "task.advanced"],
    "headers": {"Authorization": f"Bearer {SECRET}", "X-Empty": ""},
    "format": "cloudevents",
    "ordered": True,
}
EVENT = Event(
    id="7-1-0-succeeded",
    name="task.succeeded",
    at=datetime(2026, 11, 21, 9, 30, 0, 123456, tzinfo=UTC),
    task={"id": 7, "type": "t", "stage": "b", "step": 1, "attempt": 0, "state": "succeeded", "labels": {}},
    detail={"content_type": "json", "result": {"note": "zwölf € ☃"}},
)


def schema(name: str) -> Any:
    return json.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_text())


def read(*entries: Any) -> tuple[subscription.Entry, ...]:
    found = Submission.from_wire({"type": "t", "callbacks": list(entries)}).callbacks
    assert found is not None
    return found


def register(*entries: Any) -> TaskType:
    document = {"name": "t", "callbacks": list(entries)}
    conform(document, "task-type")
    return TaskType.from_wire(document)


def with_headers(headers: Any) -> dict[str, Any]:
    return {"url": URL, "headers": headers}


def test_an_object_survives_reading_and_writing() -> None:
    """C1: every field reaches the column and comes back; a URL alone stays a URL."""
    entries = read(URL, WHOLE)
    assert entries == (
        URL,
        Subscription(
            url=URL,
            events=("task.failed", "task.advanced"),
            headers=WHOLE["headers"],
            format=Format.CLOUDEVENTS,
            ordered=True,
        ),
    )
    assert subscription.to_wire(entries) == [URL, WHOLE]
    assert subscription.from_columns(subscription.to_columns(entries)) == entries


def test_an_object_with_defaults_is_a_url() -> None:
    """A subscription has one form only, so plain callbacks pay nothing for objects."""
    assert read({"url": URL, "headers": {}, "format": "event", "ordered": False}) == (URL,)


def test_no_list_and_an_empty_list_differ() -> None:
    """C1: without a list the callbacks of the type apply, and with an empty list none; also on
    the wire."""
    silent, none = Submission.from_wire({"type": "t"}), Submission.from_wire({"type": "t", "callbacks": []})
    assert (silent.callbacks, none.callbacks) == (None, ())
    assert "callbacks" not in silent.to_wire()
    assert none.to_wire()["callbacks"] == []


@pytest.mark.parametrize(
    ("entry", "pointer", "words"),
    [
        (5, "", "neither string nor object"),
        ([URL], "", "neither string nor object"),
        ({}, "", '"url" is a required property'),
        ({"url": 5}, "/url", "not of type"),
        ({"url": "ftp://x"}, "/url", "absolute http:// or https://"),
        ({"url": "http://a b/"}, "/url", "blanks"),
        ({"url": "http://a/b c"}, "/url", "character 11 is ' '"),
        ({"url": "http://127.1/"}, "/url", "'127.1' is neither a host name nor an IP address"),
        ({"url": "http://2130706433/"}, "/url", "neither a host name nor an IP address"),
        ({"url": "http://0x7f.1/"}, "/url", "'0x7f.1' is neither a host name nor an IP address"),
        ({"url": URL, "uri": 1}, "", "'uri' was unexpected"),
        ({"url": URL, "events": "none"}, "/events", '"final", "all"'),
        ({"url": URL, "events": []}, "/events", "less than 1 item"),
        ({"url": URL, "events": ["task.done"]}, "/events/0", '"task.succeeded"'),
        ({"url": URL, "events": ["task.failed"] * 2}, "/events", "non-unique"),
        ({"url": URL, "format": "xml"}, "/format", '"event", "cloudevents"'),
        ({"url": URL, "ordered": "yes"}, "/ordered", "boolean"),
        (with_headers(["X"]), "/headers", 'not of type "object"'),
        (with_headers({"X": 5}), "/headers/X", 'not of type "string"'),
        (with_headers({str(n): "" for n in range(MAX_HEADERS + 1)}), "/headers", "more than 20"),
        (
            with_headers({"X": "x" * MAX_HEADERS_BYTES}),
            "/headers",
            "4,097 bytes together; 4,096 is the limit",
        ),
        (with_headers({"": "x"}), "/headers/", "name of a header"),
        (with_headers({"X Y": "x"}), "/headers/X Y", "name of a header"),
        (with_headers({"X:": "x"}), "/headers/X:", "name of a header"),
        (with_headers({"ü": "x"}), "/headers/ü", "name of a header"),
        (with_headers({"a/b": "x"}), "/headers/a~1b", "name of a header"),
        (with_headers({"X-A": "1", "x-a": "2"}), "/headers/x-a", "given twice"),
        (
            with_headers({"X": "a\r\nHost: b"}),
            "/headers/X",
            "character 2 of the value is not printable ASCII",
        ),
        (with_headers({"X": "a\tb"}), "/headers/X", "character 2"),
        (with_headers({"X": "ü"}), "/headers/X", "character 1"),
        (with_headers({"X": "\x7f"}), "/headers/X", "character 1"),
        (with_headers({"X": "***"}), "/headers/X", "in place of a secret"),
        *(
            (with_headers({name: "x"}), f"/headers/{name}", f"{name} is Penstock's own to send")
            for name in (
                "Host",
                "content-length",
                "Content-Type",
                "Content-Encoding",
                "TRANSFER-ENCODING",
                "connection",
                "Keep-Alive",
                "Upgrade",
                "TE",
                "Trailer",
                "Expect",
                "Accept-Encoding",
                "User-Agent",
                "webhook-id",
                "Webhook-Signature",
                "webhook-anything",
                "Proxy-Authorization",
            )
        ),
    ],
)
def test_an_invalid_entry_is_refused_with_a_pointer(entry: Any, pointer: str, words: str) -> None:
    """T5, C1: the error is precise, and the same for a task and for a type."""
    with pytest.raises(InvalidRecord) as of_task:
        read(URL, entry)
    with pytest.raises(InvalidRecord) as of_type:
        register(URL, entry)
    for refused in (of_task, of_type):
        assert refused.value.pointer == f"/callbacks/1{pointer}"
        assert words in refused.value.reason


def test_entries_at_the_limits_are_accepted() -> None:
    """Entries exactly at the limits are accepted."""
    headers = {f"X-{n:02}": "y" for n in range(MAX_HEADERS)}
    headers["X-00"] += "y" * (MAX_HEADERS_BYTES - sum(len(k) + len(v) for k, v in headers.items()))
    assert read(*({"url": f"{URL}/{n}", "headers": headers} for n in range(5)))


@pytest.mark.parametrize(
    "callbacks",
    [
        [with_headers({"Authorization": SECRET + "\n"})],
        [with_headers({"Host": SECRET})],
        [with_headers({"X": "x" * MAX_HEADERS_BYTES + SECRET})],
        [with_headers({"X": [SECRET]})],
        [with_headers(SECRET)],
        [with_headers([SECRET])],
        [{"url": URL, "header": {"X": SECRET}}],
        [{"headers": {"X": SECRET}}],
        [[with_headers({"X": SECRET})]],
        [with_headers({"X": SECRET})] * 2,
        [with_headers({"X": SECRET, "n": str(n)}) for n in range(6)],
        with_headers({"X": SECRET}),
        json.dumps([with_headers({"X": SECRET})]),
        [json.dumps(with_headers({"X": SECRET}))],
        [json.dumps(with_headers({"X": SECRET * 1000}))],
    ],
)
def test_no_refusal_quotes_a_secret(callbacks: Any) -> None:
    """C7: refusals appear in answers, logs and a topic, so none quotes the value of a header."""
    document = {"type": "t", "callbacks": callbacks}
    with pytest.raises(InvalidRecord) as refused:
        Submission.from_wire(document)
    errors = [refused.value, *problems(document, "submitted"), *problems([document], "submitted")]
    assert SECRET not in " ".join(str(error) for error in errors)


def test_a_refusal_quotes_values_that_are_no_secrets() -> None:
    """T5: the error about a mistyped priority quotes it, also beside a callback with secrets."""
    found = problems({"type": "t", "priority": "URGENT", "callbacks": [WHOLE, {"url": 5}]}, "submitted")
    assert {(fault.pointer, fault.reason.split(" is ")[0]) for fault in found} == {
        ("/priority", '"URGENT"'),
        ("/callbacks/1/url", "5"),
    }


def test_no_repr_has_a_secret() -> None:
    """C7: tasks, types and callbacks may appear in logs and tracebacks."""
    submission = Submission.from_wire({"type": "t", "callbacks": [WHOLE]})
    task_type = TaskType.from_wire({"name": "t", "callbacks": [WHOLE]})
    target = TargetId("default", f"{URL}/{SECRET}")
    callback = Callback(id="1", target=target, task_id=1, attempt=0, body=b"", headers={"X": SECRET})
    assert SECRET not in repr([submission, task_type, callback])
    assert SECRET not in str(task_type.masked())
    assert SECRET in str(task_type.to_wire())
    assert subscription.masked([URL, *(submission.callbacks or ())]) == [
        URL,
        {**WHOLE, "headers": {"Authorization": "***", "X-Empty": "***"}},
    ]
    assert callback.masked_options() == {"headers": {"X": "***"}}


@pytest.mark.parametrize("task_events", ["final", "all"])
@given(event=st.sampled_from(sorted(EVENTS)))
def test_a_target_is_called_at_the_events_of_its_filter(task_events: str, event: str) -> None:
    """C1: the filter of the target decides, or without one the events of the task."""

    def is_called(events: Any) -> bool:
        [found] = read({"url": URL, "ordered": True, **({"events": events} if events else {})})
        return subscription.expand(found).includes(event, task_events)

    assert is_called("all")
    assert is_called("final") is (event in FINAL_EVENTS)
    assert is_called(["task.retried", "task.failed"]) is (event in ("task.retried", "task.failed"))
    assert is_called(None) is (task_events == "all" or event in FINAL_EVENTS)
    assert subscription.expand(URL).includes(event, task_events) is is_called(None)


def test_the_schemas_of_tasks_and_types_agree_with_the_code() -> None:
    """Forms, names of events, formats and limits exist in two schemas and in code, and must
    agree."""
    submitted, of_type = (schema(name)["properties"]["callbacks"] for name in ("submitted", "task-type"))
    assert submitted["items"] == of_type["items"]
    assert submitted["maxItems"] == of_type["maxItems"]
    fields = submitted["items"]["oneOf"][1]["properties"]
    assert set(fields) == {field.name for field in dataclasses.fields(Subscription)}
    assert set(fields["events"]["oneOf"][1]["items"]["enum"]) == TASK_EVENTS
    assert set(schema("event")["properties"]["event"]["enum"]) == EVENTS
    assert fields["format"]["enum"] == [form.value for form in Format]
    assert fields["headers"]["maxProperties"] == MAX_HEADERS
    assert f"{MAX_HEADERS_BYTES:,} bytes" in fields["headers"]["description"]


def test_the_callbacks_of_flows_are_those_of_tasks_but_for_the_events() -> None:
    """C1, F4: targets of flows have the fields and limits of those of tasks, and the events of
    flows."""
    of_task, of_flow = (schema(name)["properties"]["callbacks"] for name in ("submitted", "flows-submitted"))
    assert of_flow["maxItems"] == of_task["maxItems"]
    task_fields, flow_fields = (each["items"]["oneOf"][1]["properties"] for each in (of_task, of_flow))
    events = set(flow_fields.pop("events")["oneOf"][1]["items"]["enum"])
    assert events == {event for event in EVENTS if event.startswith("flow.")}
    task_fields.pop("events")
    for fields in (task_fields, flow_fields):
        fields["ordered"].pop("description")
    assert flow_fields == task_fields


def test_a_record_has_headers_and_order_only_if_set() -> None:
    """The record of a plain callback has the required fields only."""
    plain = Callback(id="1", target=TargetId("default", URL), task_id=1, attempt=0, body=b"{}")
    assert set(json.loads(plain.encode())) == {"id", "target", "task_id", "attempt", "body"}
    assert subscription.expand(URL).request_headers() is None
    more = dataclasses.replace(plain, headers={"X": SECRET}, ordered=True)
    for callback in (plain, more):
        conform(json.loads(callback.encode()), "callback")
        assert inbound.decode_callbacks(callback.encode()) == ([callback], [])


def test_the_envelope_is_a_cloudevent() -> None:
    """C1: the package of CloudEvents reads the body, and its data is exactly the event."""
    body = envelope(EVENT, "https://shop.example/tasks")
    found = http.from_http_event(http.HTTPMessage({"content-type": CONTENT_TYPE}, body))
    assert found.get_attributes() == {
        "specversion": "1.0",
        "id": EVENT.id,
        "source": "https://shop.example/tasks",
        "type": "penstock.task.succeeded",
        "subject": "7",
        "time": EVENT.at,
        "datacontenttype": "application/json",
    }
    assert found.get_data() == json.loads(EVENT.encode())
    assert EVENT.encode() in body


@pytest.mark.parametrize("source", [" ", "/pen stock", "/ü", "/a%zz", "/a\n"])
def test_an_invalid_source_is_refused(source: str) -> None:
    """CloudEvents: `source` is a URI reference. A wrong one stops the service at its start."""
    with pytest.raises(SettingsError, match="PENSTOCK_EVENT_SOURCE"):
        Platform.load({"PENSTOCK_EVENT_SOURCE": source})


@pytest.mark.parametrize("source", ["/penstock", "https://shop.example/a%20b?c#d", "urn:x:y"])
def test_a_valid_source_is_accepted(source: str) -> None:
    """CloudEvents: `source` may be any URI reference."""
    assert Platform.load({"PENSTOCK_EVENT_SOURCE": source}).event_source == source
