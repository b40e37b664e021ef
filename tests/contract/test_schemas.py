"""schemas/messages and penstock.contracts agree: each example is valid and survives a round
trip."""

import base64
import json
from datetime import UTC, datetime

import jsonschema
import orjson
import pytest

from penstock.contracts import inbound, task_log
from penstock.contracts.context import ContentType, Context
from penstock.contracts.event import (
    CALLBACK_RECORD_BYTES,
    CALLBACKS_PER_RECORD,
    Callback,
    Event,
    encode_callbacks,
)
from penstock.contracts.files import schemas_folder
from penstock.contracts.flow_submission import FlowEvent, FlowSubmission
from penstock.contracts.inbound_logs import decode_logs
from penstock.contracts.inbound_workers import decode_statuses
from penstock.contracts.parsing import parse
from penstock.contracts.progress import headers_of
from penstock.contracts.ready import ReadyTask
from penstock.contracts.rejected import encode_rejection
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.revocation import Revocation
from penstock.contracts.submission import Submission
from penstock.contracts.validation import conform, problems
from penstock.contracts.worker_status import encode_statuses
from penstock.core.completion import Fence, Outcome
from penstock.core.target import TargetId
from penstock.errors import InvalidRecord
from penstock.postgres.types import TaskType

MESSAGES = schemas_folder() / "messages"
SCHEMAS = sorted(path.name.removesuffix(".schema.json") for path in MESSAGES.glob("*.schema.json"))
EXAMPLES = sorted(path.name for path in MESSAGES.glob("*.example.json"))


def schema_of(example: str) -> str:
    return example.split(".", 1)[0]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_valid_and_has_an_example(name):
    """Every record has a JSON Schema and an example."""
    schema = json.loads((MESSAGES / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert any(schema_of(example) == name for example in EXAMPLES), f"no example of {name}"
    assert schema["description"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_conforms(example):
    """Our validator and an independent one accept the example."""
    document = json.loads((MESSAGES / example).read_text())
    conform(document, schema_of(example))
    schema = json.loads((MESSAGES / f"{schema_of(example)}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


def through_results(data):
    worker, results, faults = inbound.decode_results(data)
    assert faults == []
    return encode_results(worker, results)


def through_event(data):
    raw = parse(data)
    at = datetime.fromisoformat(raw["at"])
    detail = {key: value for key, value in raw.items() if key not in ("id", "event", "at", "task", "flow")}
    return Event(
        id=raw["id"], name=raw["event"], at=at, task=raw.get("task"), flow=raw.get("flow"), detail=detail
    ).encode()


def through_rejected(data):
    raw = parse(data)
    return encode_rejection(
        InvalidRecord(raw["reason"], pointer=raw["pointer"]),
        topic=raw["topic"],
        partition=raw["partition"],
        offset=raw["offset"],
        original=base64.b64decode(raw["original"]),
        at=datetime.fromisoformat(raw["rejected_at"]).astimezone(UTC),
    )


def through_callbacks(data):
    callbacks, faults = inbound.decode_callbacks(data)
    assert not faults
    ((_key, value),) = encode_callbacks(callbacks)
    return value


def through_logs(data):
    chunks = decode_logs(data)
    return task_log.encode_record(chunks[0].worker, chunks)


def through_progress(data):
    progress, faults = inbound.decode_progress(data)
    assert not faults
    ((_name, value),) = headers_of(progress)
    return value


def through_statuses(data):
    status, *over_http = decode_statuses(data)
    [value] = encode_statuses(status, over_http)
    return value


ROUND_TRIPS = {
    "worker-status": through_statuses,
    "task-logs": through_logs,
    "ready": lambda data: ReadyTask.decode(data).encode(),
    "heartbeat": lambda data: inbound.decode_heartbeat(data)[0].encode(),
    "heartbeat-progress": through_progress,
    "revoked": lambda data: Revocation.decode(data).encode(),
    "stage-results": through_results,
    "event": through_event,
    "callback": through_callbacks,
    "rejected": through_rejected,
    "task-type": lambda data: orjson.dumps(TaskType.from_wire(parse(data)).to_wire()),
}


def comparable(document):
    """The document with its moments in one form."""
    if isinstance(document, dict):
        return {key: comparable(value) for key, value in document.items()}
    if isinstance(document, list):
        return [comparable(value) for value in document]
    if isinstance(document, str) and document[:2] == "20" and "T" in document:
        return datetime.fromisoformat(document)
    return document


@pytest.mark.parametrize("example", [name for name in EXAMPLES if schema_of(name) in ROUND_TRIPS])
def test_every_example_survives_the_dataclass(example):
    """The examples survive reading and writing by `contracts`."""
    document = json.loads((MESSAGES / example).read_text())
    again = json.loads(ROUND_TRIPS[schema_of(example)](orjson.dumps(document)))
    assert comparable(again) == comparable(document)


# Producers write these records; the platform only reads them.
SUBMISSIONS = {
    "submitted": Submission,
    "flows-submitted": FlowSubmission,
    "flow-events-submitted": FlowEvent,
}


@pytest.mark.parametrize("example", [name for name in EXAMPLES if schema_of(name) in SUBMISSIONS])
def test_no_field_of_a_submission_is_ignored(example):
    """Each field of the examples changes what `contracts` reads."""
    document = json.loads((MESSAGES / example).read_text())
    schema = json.loads((MESSAGES / f"{schema_of(example)}.schema.json").read_text())
    read = SUBMISSIONS[schema_of(example)].from_wire
    for name in document:
        if name in schema["required"]:
            assert getattr(read(document), name) == document[name]
        else:
            assert read({key: document[key] for key in document if key != name}) != read(document), name


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("document", "pointer", "words"),
    [
        ({}, "", "type"),
        ({"type": "a b"}, "/type", "a b"),
        ({"type": "t", "run_at": "soon"}, "/run_at", "date-time"),
        ({"type": "t", "content_type": "text", "context": 5}, "/context", "string"),
        ({"type": "t", "content_type": "bytes", "context": "?"}, "/context", "base64"),
        ({"type": "t", "content_type": "url", "context": "nowhere"}, "/context", "URL"),
        ({"type": "t", "callbacks": ["http://ok.example", "http://a:b@c"]}, "/callbacks/1", "password"),
        ({"type": "t", "labels": {"a": 1}}, "/labels/a", "string"),
        ({"type": "t", "labels": {"a": "\0"}}, "/labels/a", "match"),
        ({"type": "t", "stage": "a\0b"}, "/stage", "match"),
        ({"type": "t", "unknown": 1}, "", "unknown"),
        ({"type": "t", "context": "x" * 900_001}, "/context", "900,000"),
        ({"type": "t", "context": nested(201)}, "/context", "deeper than 200"),
        ({"type": "t", "context": nested(1000)}, "/context", "deeper than 200"),
        (["type"], "", "object"),
        (None, "", "object"),
    ],
)
def test_an_invalid_submission_is_refused_with_pointer_and_reason(document, pointer, words):
    """T5: a malformed submission gets a precise error."""
    with pytest.raises(InvalidRecord if words != "900,000" else Exception) as caught:
        Submission.from_wire(document)
    assert caught.value.pointer == pointer
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"{", "not JSON"), (b"\xff\xfe", "not UTF-8: byte 0"), (b"", "not JSON"), (b"NaN", "not JSON")],
)
def test_an_error_distinguishes_malformed_json_from_a_wrong_encoding(data, words):
    """T5: the error names the byte or the place in the JSON."""
    with pytest.raises(InvalidRecord, match=words):
        parse(data)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**29])
def test_an_integer_that_would_be_rounded_is_refused(number):
    """The platform must not change contexts, so it refuses integers that it would round."""
    with pytest.raises(InvalidRecord, match="more than 64 bits: send it as a string"):
        parse(b'{"n":[%d]}' % number, exact=True)


def test_numbers_within_64_bits_are_accepted():
    document = {"n": 2**64 - 1, "m": -(2**63), "text": "1" * 40, "x": 0.25}
    assert parse(orjson.dumps(document), exact=True) == document


def test_a_value_at_the_depth_limit_can_be_written_everywhere():
    """An accepted value can be written as a context, in a record and in an event."""
    submission = Submission.from_wire({"type": "t", "context": nested(200)})
    assert Context.encode(nested(200)) == submission.context
    result = StageResult(fence=Fence(1, 0, "a", 0), outcome=Outcome.DONE, context=submission.context)
    _worker, [again], faults = inbound.decode_results(encode_results("w", [result]))
    assert (again.context, faults) == (submission.context, [])
    with pytest.raises(InvalidRecord, match="deeper than 200"):
        Context.encode(nested(201))


def test_an_invalid_entry_does_not_affect_its_batch():
    """Invalid input never blocks later input: a batch is read entry by entry.

    An invalid entry that names its attempt ends the attempt as a failure, because its worker has
    finished.
    """
    good = StageResult(
        fence=Fence(1, 0, "a", 0), outcome=Outcome.DONE, context=Context.encode({"x": 1})
    ).to_wire()
    bad = {**good, "outcome": "maybe"}
    worse = {**good, "id": 2, "content_type": "bytes", "context": "?"}
    without_id = {**good, "id": "three"}
    deep = {**good, "id": 4, "context": "deep"}
    worker, results, faults = inbound.decode_results(
        orjson.dumps(
            {"worker": "w", "results": [good, bad, worse, without_id, deep, good]},
            option=orjson.OPT_PASSTHROUGH_SUBCLASS,
            default=str,
        ).replace(b'"deep"', b"[" * 300 + b"]" * 300)
    )
    assert worker == "w"
    assert [(r.fence.id, r.outcome.value) for r in results] == [
        (1, "done"),
        (1, "fail"),
        (2, "fail"),
        (4, "fail"),
        (1, "done"),
    ]
    assert results[2].error.kind == "InvalidResult"
    assert "base64" in results[2].error.message
    assert sorted(fault.pointer for fault, _entry in faults) == [
        "/results/1/outcome",
        "/results/2/context",
        "/results/3/id",
        "/results/4/context",
    ]


def test_a_record_that_is_no_batch_is_refused():
    """Without a worker and a list no entry can be read."""
    for document in (b"[]", b'{"worker":"w"}', b'{"worker":"w","results":5}', b'{"results":[]}'):
        with pytest.raises(InvalidRecord):
            inbound.decode_results(document)


def test_large_integers_are_refused_before_they_reach_the_database():
    """An id beyond the range of PostgreSQL is an error of the sender, and not a crash."""
    for task in (0, -1, 2**63, 1.5):
        document = {"kind": "beat", "worker": "w", "lease_ms": 1000, "tasks": [[task, 0, 0]]}
        assert problems(document, "heartbeat"), task


@pytest.mark.parametrize(
    ("kind", "lease_ms", "fits"),
    [("claim", 0, False), ("beat", 0, False), ("claim", 1, True), ("beat", 1, True), ("release", 0, True)],
)
def test_a_lease_of_zero_length_is_refused(kind, lease_ms, fits):
    """The lease would expire at once; only the end of a lease has 0."""
    document = {"kind": kind, "worker": "w", "lease_ms": lease_ms, "tasks": [[1, 0, 0]]}
    assert (not problems(document, "heartbeat")) is fits


def test_results_carry_errors_and_bytes():
    """Failures keep their traceback, and bytes become base64."""
    result = StageResult(
        fence=Fence(3, 1, "b", 2),
        outcome=Outcome.FAIL,
        error=Failure(kind="ValueError", message="no", traceback="Traceback…"),
        max_attempts=4,
    )
    handed_on = StageResult(
        fence=Fence(4, 0, "a", 0),
        outcome=Outcome.NEXT,
        next_stage="b",
        context=Context(ContentType.BYTES, b"\x00\xff"),
    )
    _worker, results, faults = inbound.decode_results(encode_results("w", [result, handed_on]))
    assert (results, faults) == ([result, handed_on], [])


def some_callbacks(count, body=b"{}"):
    return [
        Callback(id=f"msg_{n}", target=TargetId("default", f"http://x/{n}"), task_id=1, attempt=0, body=body)
        for n in range(count)
    ]


def test_records_of_callbacks_carry_many_in_order_and_within_bounds():
    """C1: one record carries many callbacks in order, and no record exceeds its limits."""
    for callbacks in (
        some_callbacks(250),
        some_callbacks(60, b"x" * 10_000),
        some_callbacks(2, b"x" * 300_000),
    ):
        records = list(encode_callbacks(callbacks))
        read = [inbound.decode_callbacks(value)[0] for _key, value in records]
        assert [callback for some in read for callback in some] == callbacks
        assert all(len(some) <= CALLBACKS_PER_RECORD for some in read)
        assert all(len(value) < CALLBACK_RECORD_BYTES + 300 for _k, value in records if value[:1] == b"[")
        assert len(records) < len(callbacks) or len(callbacks) == 2
        assert [key for key, _value in records] == [
            some[0].target.url.encode() if len(some) == 1 else None for some in read
        ]


def test_an_invalid_callback_does_not_affect_its_record():
    """T5: the error points at the invalid entry, and the other entries are read."""
    good = [json.loads(callback.encode()) for callback in some_callbacks(3)]
    record = [
        good[0],
        {**good[1], "attempt": -1},
        good[1],
        5,
        [good[2]],
        {**good[2], "task_id": "?"},
        good[2],
    ]
    callbacks, faults = inbound.decode_callbacks(orjson.dumps(record))
    assert callbacks == some_callbacks(3)
    assert [fault.pointer for fault, _entry in faults] == ["/1/attempt", "/3", "/4", "/5/task_id"]
    assert [json.loads(entry) for _fault, entry in faults] == [record[n] for n in (1, 3, 4, 5)]


@pytest.mark.parametrize(
    ("record", "pointer"),
    [
        ([], ""),
        (5, ""),
        ({"id": "a"}, ""),
        ({**json.loads(some_callbacks(1)[0].encode()), "attempt": -1}, "/attempt"),
    ],
)
def test_a_record_without_callbacks_is_refused(record, pointer):
    """T5: the error has the reason and a pointer."""
    with pytest.raises(InvalidRecord) as refused:
        inbound.decode_callbacks(orjson.dumps(record))
    assert refused.value.pointer == pointer
