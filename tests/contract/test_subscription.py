"""What may be said of a callback, what is refused and how it is told; secrets that nobody is told; CloudEvents."""

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
from penstock.contracts.event import EVENTS, FINAL_EVENTS, Callback, Event
from penstock.contracts.files import schemas_folder
from penstock.contracts.submission import Submission
from penstock.contracts.subscription import HEADERS_BYTES, MOST_HEADERS, Format, Subscription
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


def test_an_object_is_read_in_whole_and_written_again() -> None:
    """C1: everything that can be said reaches the column and comes back; a URL alone stays one."""
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


def test_an_object_that_says_nothing_is_a_url() -> None:
    """One way to say it, which costs the path of plain callbacks nothing."""
    assert read({"url": URL, "headers": {}, "format": "event", "ordered": False}) == (URL,)


def test_nothing_said_and_none_wanted_are_two_things() -> None:
    """C1: a task without `callbacks` takes its type's, one with an empty list none; that survives the wire."""
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
        ({"url": URL, "uri": 1}, "", "'uri' was unexpected"),
        ({"url": URL, "events": "none"}, "/events", '"final", "all"'),
        ({"url": URL, "events": []}, "/events", "less than 1 item"),
        ({"url": URL, "events": ["task.done"]}, "/events/0", '"task.succeeded"'),
        ({"url": URL, "events": ["task.failed"] * 2}, "/events", "non-unique"),
        ({"url": URL, "format": "xml"}, "/format", '"event", "cloudevents"'),
        ({"url": URL, "ordered": "yes"}, "/ordered", "boolean"),
        (with_headers(["X"]), "/headers", 'not of type "object"'),
        (with_headers({"X": 5}), "/headers/X", 'not of type "string"'),
        (with_headers({str(n): "" for n in range(MOST_HEADERS + 1)}), "/headers", "more than 20"),
        (with_headers({"X": "x" * HEADERS_BYTES}), "/headers", "4,097 bytes together; 4,096 is the limit"),
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
def test_what_cannot_be_meant_is_refused_where_it_stands(entry: Any, pointer: str, words: str) -> None:
    """T5, C1: a precise error with a pointer, and the same for a task and for a type."""
    with pytest.raises(InvalidRecord) as of_task:
        read(URL, entry)
    with pytest.raises(InvalidRecord) as of_type:
        register(URL, entry)
    for refused in (of_task, of_type):
        assert refused.value.pointer == f"/callbacks/1{pointer}"
        assert words in refused.value.reason


def test_the_most_that_may_be_said_is_taken() -> None:
    """The limits are reached, not only passed."""
    headers = {f"X-{n:02}": "y" for n in range(MOST_HEADERS)}
    headers["X-00"] += "y" * (HEADERS_BYTES - sum(len(k) + len(v) for k, v in headers.items()))
    assert read(*({"url": f"{URL}/{n}", "headers": headers} for n in range(5)))


@pytest.mark.parametrize(
    "callbacks",
    [
        [with_headers({"Authorization": SECRET + "\n"})],
        [with_headers({"Host": SECRET})],
        [with_headers({"X": "x" * HEADERS_BYTES + SECRET})],
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
    """C7: refusals are answered, logged and parked on a topic; what was meant to be a header is in none."""
    document = {"type": "t", "callbacks": callbacks}
    with pytest.raises(InvalidRecord) as refused:
        Submission.from_wire(document)
    told = [refused.value, *problems(document, "submitted"), *problems([document], "submitted")]
    assert SECRET not in " ".join(str(one) for one in told)


def test_other_refusals_still_quote() -> None:
    """T5: whoever mistyped a priority reads what they typed, beside a callback with secrets too."""
    found = problems({"type": "t", "priority": "URGENT", "callbacks": [WHOLE, {"url": 5}]}, "submitted")
    assert {(one.pointer, one.reason.split(" is ")[0]) for one in found} == {
        ("/priority", '"URGENT"'),
        ("/callbacks/1/url", "5"),
    }


def test_no_repr_has_a_secret() -> None:
    """C7: tasks, types and callbacks end up in logs and tracebacks."""
    submission = Submission.from_wire({"type": "t", "callbacks": [WHOLE]})
    task_type = TaskType.from_wire({"name": "t", "callbacks": [WHOLE]})
    callback = Callback(
        id="1", target=TargetId("default", URL), task_id=1, attempt=0, body=b"", headers={"X": SECRET}
    )
    assert SECRET not in repr([submission, task_type, callback])
    assert SECRET not in str(task_type.shown())
    assert SECRET in str(task_type.to_wire())
    assert subscription.shown([URL, *(submission.callbacks or ())]) == [
        URL,
        {**WHOLE, "headers": {"Authorization": "***", "X-Empty": "***"}},
    ]
    assert callback.shown_options() == {"headers": {"X": "***"}}


@pytest.mark.parametrize("asked", ["final", "all"])
@given(event=st.sampled_from(sorted(EVENTS)))
def test_a_target_hears_what_it_asked_for(asked: str, event: str) -> None:
    """C1: by its own filter whatever the task publishes; without one, by the task's."""

    def heard(events: Any) -> bool:
        [found] = read({"url": URL, "ordered": True, **({"events": events} if events else {})})
        return subscription.of(found).wants(event, asked)

    assert heard("all")
    assert heard("final") is (event in FINAL_EVENTS)
    assert heard(["task.retried", "task.failed"]) is (event in ("task.retried", "task.failed"))
    assert heard(None) is (asked == "all" or event in FINAL_EVENTS)
    assert subscription.of(URL).wants(event, asked) is heard(None)


def test_tasks_and_types_take_the_same_by_words_of_the_code() -> None:
    """Habit 8: what is written twice stays one: forms, names of events, formats, limits."""
    submitted, of_type = (schema(name)["properties"]["callbacks"] for name in ("submitted", "task-type"))
    assert submitted["items"] == of_type["items"]
    assert submitted["maxItems"] == of_type["maxItems"]
    fields = submitted["items"]["oneOf"][1]["properties"]
    assert set(fields) == {field.name for field in dataclasses.fields(Subscription)}
    assert set(fields["events"]["oneOf"][1]["items"]["enum"]) == EVENTS
    assert set(schema("event")["properties"]["event"]["enum"]) == EVENTS
    assert fields["format"]["enum"] == [form.value for form in Format]
    assert fields["headers"]["maxProperties"] == MOST_HEADERS
    assert f"{HEADERS_BYTES:,} bytes" in fields["headers"]["description"]


def test_headers_and_order_travel_with_the_callback_and_only_then() -> None:
    """A plain callback's record is what it was, so that services from before take it."""
    plain = Callback(id="1", target=TargetId("default", URL), task_id=1, attempt=0, body=b"{}")
    assert set(json.loads(plain.encode())) == {"id", "target", "task_id", "attempt", "body"}
    assert subscription.of(URL).sent_headers() is None
    more = dataclasses.replace(plain, headers={"X": SECRET}, ordered=True)
    for callback in (plain, more):
        conform(json.loads(callback.encode()), "callback")
        assert inbound.decode_callbacks(callback.encode()) == ([callback], [])


def test_the_envelope_is_a_cloudevent() -> None:
    """C1: CloudEvents' own package reads it, and its data is the event to the byte."""
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
def test_a_source_that_is_none_is_refused(source: str) -> None:
    """CloudEvents: `source` is a URI reference; at start-up rather than by every target."""
    with pytest.raises(SettingsError, match="event_source"):
        Platform.load({"PENSTOCK_EVENT_SOURCE": source})


@pytest.mark.parametrize("source", ["/penstock", "https://shop.example/a%20b?c#d", "urn:x:y"])
def test_a_source_that_is_one_is_taken(source: str) -> None:
    """CloudEvents: any URI reference."""
    assert Platform.load({"PENSTOCK_EVENT_SOURCE": source}).event_source == source
