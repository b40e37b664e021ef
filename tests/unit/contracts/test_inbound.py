"""Records from outside: any bytes become entries or precise rejections, and no entry affects
another."""

import json
from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts import inbound, parsing
from penstock.contracts.cloudevent import envelope
from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.event import Callback, Event
from penstock.contracts.inbound_workers import decode_statuses
from penstock.contracts.ready import ReadyTask
from penstock.contracts.rejected import encode_rejection, rejection_key
from penstock.contracts.result import StageResult, encode_results, handed_back
from penstock.contracts.revocation import Revocation
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.target import TargetId
from penstock.errors import Invalid, InvalidRecord, TooLarge
from penstock.gateway.report_entries import parse_entries

# Any text, with NUL, lone surrogates and the words of the contracts.
TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=12),
    st.sampled_from(
        [
            "\0",
            "\ud800",
            "a\0b",
            "",
            "w",
            "done",
            "next",
            "handed_back",
            "bytes",
            "x" * 10_001,
            "http://x/\u6f22" * 300,
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, 81.0, 2**63 - 1, 2**63, float(2**63), 10**30, -1, 1e308, 2**31]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
GOOD_REF = ObjectRef.of(b"x" * 5000).to_wire()
REFERENCES = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {
            "key": st.one_of(
                TEXTS,
                st.sampled_from(
                    ["a//b", "../x", "a\0b", "k" * 300, "./contexts/x", "history/2026-01-01", GOOD_REF["key"]]
                ),
            ),
            "sha256": st.one_of(TEXTS, st.sampled_from([GOOD_REF["sha256"], "0" * 64])),
            "size": NUMBERS,
        }
    ),
)
# Large contexts by their marks: hypothesis cannot print the values themselves.
LARGE = {
    "@escaped@": b'"' + b"\\u0001" * 100_000 + b'"',
    "@grows@": b"[" + b",".join([b"1e9"] * 100_000) + b"]",
}
FIELDS = {
    "id": st.one_of(NUMBERS, VALUES),
    "step": st.one_of(NUMBERS, VALUES),
    "stage": st.one_of(TEXTS, VALUES),
    "attempt": NUMBERS,
    "outcome": TEXTS,
    "next_stage": TEXTS,
    "content_type": TEXTS,
    "context": st.one_of(VALUES, st.sampled_from(sorted(LARGE))),
    "context_ref": REFERENCES,
    "delay_ms": NUMBERS,
    "no_handler": VALUES,
    "permanent": VALUES,
    "max_attempts": NUMBERS,
    "error": st.one_of(VALUES, st.fixed_dictionaries({"kind": TEXTS, "message": TEXTS, "traceback": TEXTS})),
    "started_ms": NUMBERS,
    "finished_ms": NUMBERS,
    "unknown": VALUES,
}
GOOD = [
    StageResult(fence=Fence(number, 0, "a", 0), outcome=Outcome.DONE, context=Context.encode({"n": number}))
    for number in (1, 2)
]
BASE = StageResult(fence=Fence(9, 0, "a", 0), outcome=Outcome.DONE, context=Context.encode(9)).to_wire()
BASE["context"] = 9
# Text that is no value of JSON, or that one parser accepts and another does not.
RAW = st.sampled_from(
    [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"\\ud800"',
        b'"\xff"',
        b"[" * 1_500 + b"]" * 1_500,
        b'{"id":1,"id":2}',
        b"01",
    ]
)


def text_of(value):
    """The JSON text of a value, also of one that orjson does not write."""
    return json.dumps(value).encode()


@given(st.fixed_dictionaries({}, optional=FIELDS), st.one_of(st.none(), RAW), st.sampled_from(sorted(FIELDS)))
def test_a_hostile_result_does_not_affect_its_neighbours(fields, raw, place):
    """T5, W4: beside any entry the results of others are read unchanged; the entry is a result or
    has a fault."""
    entry = text_of({**BASE, **fields})
    if raw is not None:
        entry = text_of({**BASE, **fields, place: "@@"}).replace(b'"@@"', raw)
    for mark, large in LARGE.items():
        entry = entry.replace(f'"{mark}"'.encode(), large)
    first, second = (orjson.dumps(result.to_wire()) for result in GOOD)
    record = b'{"worker":"w","results":[%b,%b,%b]}' % (first, entry, second)
    worker, results, faults = inbound.decode_results(record)
    assert worker == "w"
    assert results[0] == GOOD[0]
    assert results[-1] == GOOD[1]
    assert len(results) in (2, 3)
    assert len(faults) <= 1
    if len(results) == 2:
        assert faults
    for fault, part in faults:
        assert fault.reason
        assert fault.pointer.startswith("/results/1")
        encode_rejection_of(fault, part)
    for result in results[1:-1]:
        assert 1 <= result.fence.id < 2**63
        # An accepted entry can be written again, and is small.
        assert len(encode_results("w", [result])) < 1_000_000
        if result.context is not None and result.context.ref is None:
            assert result.context.size <= 4096


@pytest.mark.parametrize("no_handler", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_both_forms_of_a_hand_back_are_read_alike(no_handler, by_name):
    """T5, T6: workers may name the outcome. This version sends the form that 0.1.0 reads, because
    its gateways and stage processors would fail the attempt otherwise."""
    result = handed_back(Fence(1, 0, "a", 0), "busy", no_handler=no_handler, delay_ms=500)
    wire = result.to_wire()
    kind = "NoHandler" if no_handler else "HandedBack"
    assert (wire["outcome"], wire["error"]) == ("retry", {"kind": kind, "message": "busy"})
    if by_name:
        error = {"kind": "any", "message": "busy"}
        wire |= {"outcome": "handed_back", "error": error, **({"no_handler": True} if no_handler else {})}
    record = orjson.dumps({"worker": "w", "results": [wire]})
    assert inbound.decode_results(record) == ("w", [result], [])


def test_only_an_attempt_that_is_handed_back_lacks_a_handler():
    """O6: beside another outcome the field has no effect, so a failure is charged."""
    wire = {**BASE, "outcome": "fail", "no_handler": True, "error": {"kind": "NoHandler", "message": "m"}}
    result = inbound.read_result(wire)
    assert (result.outcome, result.no_handler) == (Outcome.FAIL, False)


def test_what_workers_report_has_no_secret_that_its_form_shows():
    """L: programs without the SDK need not redact."""
    error = {"kind": "E", "message": "password=planted", "traceback": "at https://planted:x@a.example"}
    result = inbound.read_result({**BASE, "outcome": "fail", "error": error})
    attempt = {name: BASE[name] for name in ("id", "step", "stage", "attempt")}
    progress = {**attempt, "outcome": "progress", "progress": {"message": "token: planted"}}
    beats, _, rejected = parse_entries([progress])
    # A fault quotes the beginning and the end of a long value.
    long = {**BASE, "outcome": "next", "next_stage": f"{'x' * 180} password={'planted' * 100}"}
    _, failures, faults = inbound.decode_results(orjson.dumps({"worker": "w", "results": [long]}))
    shown = repr((result, beats, rejected, failures, faults[0][0]))
    assert result.error.message == "password=[redacted]"
    assert beats[0].progress.message == "token: [redacted]"
    assert "planted" not in shown


def encode_rejection_of(fault, part):
    return encode_rejection(
        fault, topic="t", partition=0, offset=0, original=part, at=datetime(2026, 1, 1, tzinfo=UTC)
    )


@given(st.one_of(st.binary(max_size=200), VALUES.map(text_of), RAW))
@pytest.mark.parametrize(
    "decode",
    [
        inbound.decode_results,
        inbound.decode_heartbeat,
        inbound.decode_callbacks,
        ReadyTask.decode,
        Revocation.decode,
        decode_statuses,
        lambda data: Submission.from_wire(parsing.parse(data, exact=True)),
    ],
)
def test_any_bytes_are_read_or_refused_precisely(decode, data):
    """T5: a decoder raises `Invalid` with a reason, and nothing else."""
    try:
        decode(data)
    except Invalid as error:
        refused = error
    else:
        return
    assert refused.reason
    encode_rejection_of(refused, data)


@given(
    st.lists(
        st.one_of(
            VALUES.map(text_of),
            RAW,
            st.lists(NUMBERS, min_size=3, max_size=3).map(text_of),
            st.just(b"[5,0,0]"),
        ),
        max_size=4,
    )
)
def test_a_hostile_attempt_does_not_affect_its_claim(entries):
    """W3: the other attempts of a claim get their leases."""
    record = b'{"kind":"claim","worker":"w","lease_ms":1000,"tasks":[%b]}' % b",".join(
        [b"[1,0,0]", *entries, b"[2,0,0]"]
    )
    heartbeat, faults = inbound.decode_heartbeat(record)
    assert heartbeat.tasks[0] == AttemptId(1, 0, 0)
    assert heartbeat.tasks[-1] == AttemptId(2, 0, 0)
    assert len(heartbeat.tasks) + len(faults) == len(entries) + 2
    assert all(0 < task < 2**63 for task, _step, _attempt in heartbeat.tasks)


CALLBACK = {"id": "1-0-0-x", "target": "http://x.example/a", "task_id": 1, "attempt": 0, "body": "{}"}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "id": TEXTS,
            "target": TEXTS,
            "task_id": NUMBERS,
            "attempt": NUMBERS,
            "body": TEXTS,
            "headers": st.one_of(VALUES, st.dictionaries(TEXTS, TEXTS, max_size=2)),
            "ordered": VALUES,
        },
    )
)
def test_a_hostile_callback_does_not_affect_its_record(fields):
    """C1: the other callbacks of a record are read."""
    record = b"[%b,%b,%b]" % (
        text_of(CALLBACK),
        text_of({**CALLBACK, **fields}),
        text_of({**CALLBACK, "id": "last"}),
    )
    callbacks, faults = inbound.decode_callbacks(record)
    assert (callbacks[0].id, callbacks[-1].id) == (CALLBACK["id"], "last")
    assert len(callbacks) + len(faults) == 3


@pytest.mark.parametrize(
    ("context", "permanent"),
    [
        (b'"' + b"x" * 900_000 + b'"', True),
        (b"[" + b",".join([b"1e9"] * 400) + b"]", True),
        (b'"' + b"x" * 4_094 + b'"', False),
    ],
)
def test_the_size_of_an_inline_context_counts_after_encoding(context, permanent):
    """T4: 1,601 bytes of `1e9,` have 5,201 after encoding: the attempt fails permanently, and the
    error says why."""
    entry = text_of({**BASE, "context": "@@"}).replace(b'"@@"', context)
    _worker, [result], faults = inbound.decode_results(b'{"worker":"w","results":[%b]}' % entry)
    assert (bool(faults), result.permanent) == (permanent, permanent)
    if permanent:
        assert result.outcome is Outcome.FAIL
        assert "4,096 is the limit of an inline one" in result.error.message


@pytest.mark.parametrize(
    "key",
    [
        "a//b",
        "../x",
        "a\0b",
        "k" * 300,
        "./contexts/a",
        "history/2026-01-01.ndjson.gz",
        "",
        "contexts/aa/" + "b" * 64,
    ],
)
def test_a_reference_names_its_own_digest(key):
    """T4: a reference to any other object is refused when it arrives, and its attempt fails
    permanently."""
    reference = {**GOOD_REF, "key": key}
    entry = {k: v for k, v in BASE.items() if k != "context"}
    record = orjson.dumps({"worker": "w", "results": [{**entry, "context_ref": reference}]})
    _worker, [result], [(fault, _part)] = inbound.decode_results(record)
    assert fault.pointer == "/results/0/context_ref/key"
    assert (result.outcome, result.permanent) == (Outcome.FAIL, True)
    with pytest.raises(InvalidRecord):
        Context.encode(Context(ContentType.JSON, ref=ObjectRef.from_wire(reference)))


def test_too_many_entries_are_refused_as_a_whole():
    """T5: a record of many tiny entries must not keep its partition waiting for a rejection
    each."""
    for record in (
        b'{"worker":"w","results":[%b]}' % b",".join([b"0"] * 20_000),
        b'{"worker":"w","results":[%b]}' % b",".join([b"NaN"] * 20_000),
        b'{"kind":"beat","worker":"w","lease_ms":1,"tasks":[%b]}' % b",".join([b"[1,0,0]"] * 20_000),
    ):
        with pytest.raises(TooLarge, match="10,000 entries"):
            (inbound.decode_heartbeat if b"tasks" in record else inbound.decode_results)(record)
    with pytest.raises(TooLarge):
        inbound.decode_callbacks(b"[%b]" % b",".join([b"0"] * 20_000))


def test_a_decompressed_record_is_not_parsed_beyond_the_limit():
    """T5: a broker limits compressed bytes; a rejection of a long record is cut, so that it fits
    its topic."""
    record = b" " * 50_000_000
    with pytest.raises(TooLarge, match="50,000,000 bytes"):
        inbound.decode_results(record)
    rejection = encode_rejection_of(InvalidRecord("x" * 10_000, pointer="/" + "p" * 900_000), record)
    assert len(rejection) < 1_400_000
    assert orjson.loads(rejection)["size"] == 50_000_000
    assert (rejection_key(b"k" * 900_000), rejection_key(b"k"), rejection_key(None)) == (None, b"k", None)


@given(st.lists(st.one_of(VALUES.map(text_of), RAW), max_size=5))
def test_a_record_is_cut_into_its_entries(entries):
    """T5: entries that can be read are the same whether their record is read as a whole or cut."""
    readable = []
    for entry in entries:
        try:
            readable.append(parsing.parse(entry))
        except InvalidRecord:
            readable.append(None)
    cut = parsing.parse_batch(
        b'{"a" : "]", "entries":[ %b ]}' % b" , ".join([*entries, b'"\\ud800"']), "entries"
    )
    assert cut["a"] == "]"
    assert len(cut["entries"]) == len(entries) + 1
    for entry, found, expected in zip(entries, cut["entries"], readable, strict=False):
        if isinstance(found, parsing.Unreadable):
            assert (expected, found.data) == (None, entry)
        else:
            assert found == expected


@pytest.mark.parametrize(
    "data",
    [b'["' + b'\\"' * 400_000, b"[" + b'"' * 800_001 + b"]", b"[" * 800_000, b"[NaN", b"[1]]NaN", b"[,NaN]"],
)
def test_a_record_without_structure_is_refused_quickly(data):
    """T5: the search for entries is linear: quadratic time would stop the partition for hours."""
    with pytest.raises(InvalidRecord):
        parsing.parse_batch(data, "")


READY = ReadyTask(Fence(7, 2, "s", 1), "t", Context.encode({"a": 1}), lease_ms=60_000, tries=1).to_wire()
READY["context"] = 1


@given(st.dictionaries(st.sampled_from(sorted(READY)), VALUES, min_size=1, max_size=2))
def test_a_ready_record_has_the_types_of_its_fields(fields):
    """W3: a record of another form is skipped alone; its id must not spoil the claim of a whole
    poll."""
    try:
        ready = ReadyTask.decode(text_of({**READY, **fields}), "t")
    except InvalidRecord:
        return
    assert {type(part) for part in ready.fence.attempt_id} == {int}
    assert 0 < ready.fence.id < 2**63
    assert (type(ready.fence.stage), ready.type) == (str, "t")
    assert 0 < ready.lease_ms <= 86_400_000


def test_a_ready_record_of_another_type_is_refused():
    """O5: a worker of one type, or namespace, must not receive a task of another."""
    with pytest.raises(InvalidRecord, match="of type 't' on the topic of 'other'"):
        ReadyTask.decode(text_of(READY), "other")


@pytest.mark.parametrize("form", ["event", "cloudevents"])
@pytest.mark.parametrize(
    "subject",
    [
        {"task": {"id": 5, "type": "acme--media", "stage": "s"}},
        {"flow": {"id": 5, "root_id": 5, "name": "acme--nightly", "version": 1}},
        {"flow": {"name": "acme--nightly", "id": 5}},
    ],
)
def test_the_target_of_a_callback_is_in_the_namespace_of_its_task_or_flow(form, subject):
    """C7, O5: the target of another namespace has its own health; its name is in the body only."""
    name = next(iter(subject)) + ".succeeded"
    event = Event(
        id="e", name=name, at=datetime(2026, 11, 23, tzinfo=UTC), **subject, detail={"result": "x--y"}
    )
    body = event.encode() if form == "event" else envelope(event, "/penstock")
    sent = Callback(id="c", target=TargetId("acme", "https://a.example"), task_id=5, attempt=0, body=body)
    [found], faults = inbound.decode_callbacks(sent.encode())
    assert (found.target, faults) == (TargetId("acme", "https://a.example"), [])
