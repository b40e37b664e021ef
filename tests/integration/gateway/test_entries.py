"""Requests with several entries: each is judged alone, and none harms those beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import orjson
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.gateways import Caller
from tests.support.services import read_records
from tests.support.waiting import wait_until

from penstock.contracts.context import ObjectRef
from penstock.contracts.inbound import decode_results
from penstock.kafka.topology.topics import STAGE_RESULTS
from penstock.settings import Kafka

SETTINGS = settings(
    max_examples=60,
    # No shrinking: it takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
REF = ObjectRef.of(b"x" * 5_000).to_wire()

# JSON texts that no JSON parser reads, or that no record can carry.
UNREADABLE = [
    b'"\\ud800"',
    b'"\xff\xfe"',
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1" * 5_000,
    b"18446744073709551616",
    b"[" * 1_500 + b"]" * 1_500,
    b"[" * 250 + b"]" * 250,
    b"tru",
    b'"a\x01b"',
    b"01",
]
WRONG = [{"type": "no"}, {"priority": 1}, {"colour": 1}, {"stage": ""}, {"key": "k" * 201}]
WRONG += [{"labels": {"a": "\0"}}, {"idempotency_key": "a\0"}, {"context_ref": REF}, {"run_at": "never"}]
WRONG += [{"context": "x" * 900_001}, {"content_type": "bytes", "context": "%"}, {"callbacks": ["x" * 3_000]}]
WRONG += [{"content_type": "url", "context": "nowhere"}, {"context": [[[]]] * 200_000}]
RESULTS = [{"context_ref": {**REF, "key": key}} for key in ("../x", "a//b", "history/x", "contexts/b/00/0")]
RESULTS += [{"context_ref": {**REF, "size": size}} for size in (-1, 10**17, "5", None)]
RESULTS += [
    {"attempt": -1},
    {"outcome": "next"},
    {"stage": "a\0"},
    {"delay_ms": 10**15},
    {"started_ms": 1e300},
]
RESULTS += [
    {"error": {"kind": "k", "message": "m" * 10_001}},
    {"id": 2**63},
    {"outcome": "progress", "lease_ms": -1},
]
JUNK = [b"null", b"7", b'"text"', b"[]", b"{}", b"[[1]]"]

# Any text between quotes: control characters, surrogates, escapes and bytes that are no UTF-8.
string = st.binary(max_size=30).map(lambda data: b'"' + data.replace(b'"', b"").replace(b"\\", b"\\u") + b'"')


def hostile(fields: dict[str, Any], wrong: list[dict[str, Any]], member: str) -> st.SearchStrategy[bytes]:
    """The JSON texts of entries that are refused, alone and beside others."""
    bare = b"," + orjson.dumps(fields)[1:-1] if fields else b""
    unreadable = st.sampled_from(UNREADABLE).map(lambda text: b'{"%b":%b%b}' % (member.encode(), text, bare))
    return st.one_of(
        unreadable,
        st.sampled_from(wrong).map(lambda more: orjson.dumps({**fields, **more})),
        st.sampled_from(JUNK + UNREADABLE),
        string.map(lambda text: b'{"no such %b":%b%b}' % (member.encode(), text, bare)),
    )


def among_valid(entries: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes | None]]:
    """Hostile entries with valid ones (None) before, between and after them."""
    return st.lists(st.one_of(st.none(), entries), max_size=8).map(lambda found: [None, *found, None])


def post(url: str, path: str, body: bytes) -> requests.Response:
    answer = requests.post(url + path, data=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code < 300, answer.text
    return answer


@pytest.fixture
def kafka(where: dict[str, Any]) -> Kafka:
    return Kafka(kafka=where["kafka"], prefix=where["prefix"])


@pytest.fixture
async def gateway(gateway: Caller) -> Caller:
    await wait_until(gateway.is_ready)
    return gateway


async def count(database: str) -> int:
    connection = await asyncpg.connect(database)
    try:
        return await connection.fetchval("SELECT count(*) FROM penstock.task")
    finally:
        await connection.close()


async def test_each_submission_of_a_batch_is_judged_alone(gateway: Caller, database: str) -> None:
    """T5: beside any bytes, all valid submissions of a batch are committed by
    their first request. Each refused one gets the pointer to its own place."""
    committed = 0

    @SETTINGS
    @given(among_valid(hostile({"type": "media"}, WRONG, "context")))
    def play(entries: list[bytes | None]) -> None:
        nonlocal committed
        texts = [b'{"type":"media","context":"i"}' if text is None else text for text in entries]
        answer = post(gateway.url, "/tasks", b"[" + b",".join(texts) + b"]").json()["tasks"]
        for place, (text, outcome) in enumerate(zip(entries, answer, strict=True)):
            if text is None:
                assert outcome["created"] is True
                committed += 1
            else:
                assert outcome["errors"], text[:100]
                for error in outcome["errors"]:
                    assert error["pointer"].split("/")[1] == str(place)

    await asyncio.to_thread(play)
    assert await count(database) == committed > 0


async def test_each_result_of_a_request_is_judged_alone(gateway: Caller, kafka: Kafka) -> None:
    """T6: beside any bytes, all valid results of a request are on Kafka after
    their first request. Each refused one gets the pointer to its own place."""
    submitted = await gateway.post("/tasks", [{"type": "media"}] * 1_000)
    ids = [task["id"] for task in submitted.body["tasks"]]
    reported: list[int] = []
    fields = {"id": ids[-1], "step": 0, "stage": "s", "attempt": 0, "outcome": "done"}

    @SETTINGS
    @given(among_valid(hostile(fields, RESULTS, "context")))
    def play(entries: list[bytes | None]) -> None:
        texts = []
        for text in entries:
            if text is None:
                reported.append(ids[len(reported)])
                text = orjson.dumps({**fields, "id": reported[-1], "context": "i"})  # noqa: PLW2901 (the valid one)
            texts.append(text)
        body = b'{"worker":"w","results":[' + b",".join(texts) + b"]}"
        answer = post(gateway.url, "/set_task", body).json()
        refused = [place for place, text in enumerate(entries) if text is not None]
        assert [each["index"] for each in answer["rejected"]] == refused
        assert answer["received"] == len(entries) - len(refused)
        for each in answer["rejected"]:
            assert all(error["pointer"].startswith(f"/results/{each['index']}") for error in each["errors"])

    await asyncio.to_thread(play)
    found = set()
    for record in await read_records(kafka.kafka, kafka.prefix + STAGE_RESULTS.name):
        _, results, faults = decode_results(record.value)
        assert not faults
        found |= {result.fence.id for result in results}
    assert found == set(reported)


async def test_each_id_of_a_request_is_judged_alone(gateway: Caller) -> None:
    """T5: beside any others, all ids of a request are counted, then cancelled. Each entry
    that is no id is named."""
    submitted = await gateway.post("/tasks", [{"type": "media"}] * 1_000)
    ids = [task["id"] for task in submitted.body["tasks"]]
    no_ids = st.one_of(
        st.sampled_from([b"0", b"-1", b"9223372036854775808", b"1.5", *UNREADABLE, *JUNK]).filter(
            lambda text: text != b"7"
        ),
        string,
    )

    @SETTINGS
    @given(among_valid(no_ids))
    def play(entries: list[bytes | None]) -> None:
        valid = [ids.pop() for text in entries if text is None]
        left = iter(valid)
        texts = [b"%d" % next(left) if text is None else text for text in entries]
        refused = [place for place, text in enumerate(entries) if text is not None]
        body = b'{"ids":[' + b",".join(texts) + b"]}"
        counted = post(gateway.url, "/tasks/states", body).json()
        assert counted["states"] == {"ready": len(valid)}
        cancelled = post(gateway.url, "/tasks/cancel", body).json()
        assert cancelled["cancelled"] == sorted(valid)
        for answer in (counted, cancelled):
            assert [each["index"] for each in answer.get("rejected", [])] == refused

    await asyncio.to_thread(play)
