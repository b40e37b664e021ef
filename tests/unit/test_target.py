"""Whom a callback is owed to: told by its record without a word of its own, as records were before there were namespaces."""

from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.cloudevent import envelope
from penstock.contracts.event import Callback, Event, encode_callbacks
from penstock.contracts.inbound import decode_callbacks
from penstock.core.target import TargetId, target_of

URL = "https://shop.example/hooks"


def read(callback: Callback) -> Callback:
    [(_key, value)] = encode_callbacks([callback])
    [found], faults = decode_callbacks(value)
    assert not faults
    return found


@given(
    st.from_regex(r"([A-Za-z0-9_]{1,20}--)?[A-Za-z0-9_-]{1,50}", fullmatch=True),
    st.booleans(),
    st.dictionaries(st.text(), st.text()),
)
def test_a_record_tells_the_namespace_of_its_target(type_name, cloudevents, labels):
    """O5: by the type in its body, in either format and whatever else stands there; its key is the URL, so that all namespaces of
    one address come to one process."""
    event = Event(
        id="81-0-0-succeeded",
        name="task.succeeded",
        at=datetime(2026, 11, 21, tzinfo=UTC),
        task={"id": 81, "type": type_name, "labels": labels},
        detail={"result": {"task": {"type": "other--type"}}},
    )
    body = envelope(event, "//penstock/a--b") if cloudevents else event.encode()
    callback = Callback(id="m", target=target_of(type_name, URL), task_id=81, attempt=0, body=body)
    assert read(callback) == callback
    [(key, value)] = encode_callbacks([callback])
    assert key == URL.encode()
    # What services from before refuse is not in it.
    assert set(orjson.loads(value)) == {"id", "target", "task_id", "attempt", "body"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "--",
        "{}",
        "[--]",
        '["--"]',
        '"--"',
        '{"task": "--"}',
        '{"task": {"type": ["--"]}}',
        '{"data": ["--"]}',
        "[" * 100_000 + "--",
    ],
    ids=range(10),
)
def test_a_body_that_is_no_event_is_of_the_default_namespace(body):
    """O5: whoever wrote it; it is called all the same."""
    callback = Callback(id="m", target=TargetId("default", URL), task_id=1, attempt=0, body=body.encode())
    assert read(callback) == callback


@pytest.mark.parametrize(
    "body",
    [
        '{"task": {"type": "acme--x"}, "id": "1"}',
        '{"id":"\\"","event":"e","at":"a","task":{"id":1,"type":"acme--x"}}',
        '{"id":"1","event":"e","at":"a","task":{"type":"acme--x","id":1}}',
        '{"data": {"task": {"type": "acme--x"}}}',
    ],
)
def test_the_type_is_found_however_the_event_is_written(body):
    """O5: what is usual is read quickly, the rest as JSON."""
    callback = Callback(id="m", target=TargetId("acme", URL), task_id=1, attempt=0, body=body.encode())
    assert read(callback) == callback


@pytest.mark.parametrize(
    ("target", "shown"),
    [(TargetId("default", URL), URL), (TargetId("acme", URL), f"{URL} (acme)")],
)
def test_people_see_the_url_and_the_namespace_if_there_is_one(target, shown):
    """O5: where nobody uses namespaces, nobody reads of them."""
    assert str(target) == shown
