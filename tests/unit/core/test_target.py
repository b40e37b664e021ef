"""The namespace of a callback's target follows from the task type in its body; records have no
field for it."""

from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.cloudevent import envelope
from penstock.contracts.event import Callback, Event, encode_callbacks
from penstock.contracts.inbound import decode_callbacks
from penstock.core.target import TargetId, host_of, server_of, target_of

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
def test_the_namespace_is_that_of_the_type_in_the_body(type_name, cloudevents, labels):
    """O5: the type in the body gives the namespace, in both formats.

    The record key is the URL, so one process owns a URL in all namespaces.
    """
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
    # Services from before namespaces would reject further fields.
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
    """O5: a callback with an unknown body is still called."""
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
    """O5: the usual form is parsed quickly, other forms as JSON."""
    callback = Callback(id="m", target=TargetId("acme", URL), task_id=1, attempt=0, body=body.encode())
    assert read(callback) == callback


@pytest.mark.parametrize(
    ("target", "shown"),
    [(TargetId("default", URL), URL), (TargetId("acme", URL), f"{URL} (acme)")],
)
def test_a_target_is_shown_with_its_namespace(target, shown):
    """O5: the default namespace is not shown."""
    assert str(target) == shown


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a.example/x?n=1", "http://a.example:80"),
        ("HTTP://user:word@A.Example.:80/y#z", "http://a.example:80"),
        ("https://a.example/", "https://a.example:443"),
        ("http://[0:0::1]:8/", "http://[::1]:8"),
        ("http://[::1/", ""),
        ("http://a:port/", ""),
    ],
)
def test_a_host_has_one_spelling(url, origin):
    """C5: path, query, letters, users and the usual port make no other host."""
    assert host_of(TargetId("acme", url)) == ("acme", origin)


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("a.example", None),
    ],
)
def test_a_server_has_all_addresses_of_its_network(address, server):
    """C5: one server with a network of IPv6 addresses gains nothing by them."""
    assert server_of(address) == server
