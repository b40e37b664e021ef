"""The callbacks service with a real Kafka, a real PostgreSQL and a scripted target."""

from __future__ import annotations

import socket
from collections import Counter

import orjson
import pytest
from aiohttp import web
from standardwebhooks import Webhook
from tests.support.callback_targets import (
    OLD_SECRET,
    SECRET,
    Bench,
    Target,
    answering,
    make_callback,
)
from tests.support.waiting import wait_until

from penstock import __version__
from penstock.callbacks.caller import EXCERPT_BYTES
from penstock.contracts.validation import conform
from penstock.kafka.topology.topics import CALLBACKS_DEAD, CALLBACKS_REJECTED


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def test_a_callback_is_delivered_signed(platform: Bench, target: Target) -> None:
    """C1, C7: the body arrives unchanged, and either active secret verifies its signature."""
    callback = make_callback(f"{target.url}/hook")
    async with platform.service(callback_secrets=(SECRET, OLD_SECRET)):
        await platform.enqueue(callback)
        await wait_until(platform.all_delivered)
    (call,) = target.calls
    assert call.body == callback.body
    assert call.headers["Content-Type"] == "application/json"
    assert call.headers["User-Agent"] == f"penstock/{__version__}"
    for secret in (SECRET, OLD_SECRET):
        Webhook(secret).verify(call.body, call.headers)
    row = (await platform.rows())[callback.id]
    assert (row["attempt"], row["error"]) == (1, None)
    assert row["finished_at"] is not None


async def test_a_failed_callback_is_retried_with_the_same_id(platform: Bench, target: Target) -> None:
    """C6, guarantee 5: a callback that fails twice is delivered at its third attempt.

    All attempts have one id, and each has its own signature.
    """
    target.answer = answering(500, 500, 200)
    callback = make_callback(f"{target.url}/hook")
    async with platform.service():
        await platform.enqueue(callback)
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id] * 3
    for call in target.calls:
        Webhook(SECRET).verify(call.body, call.headers)
    assert (await platform.rows())[callback.id]["attempt"] == 3


async def test_retry_after_is_a_floor(platform: Bench, target: Target) -> None:
    """C6: a Retry-After of two seconds delays the retry, although the schedule says 0.3 s."""
    target.answer = answering(503, 200, **{"Retry-After": "2"})
    async with platform.service():
        await platform.enqueue(make_callback(f"{target.url}/hook"))
        await wait_until(platform.all_delivered)
    first, second = target.calls
    assert second.at_s - first.at_s >= 1.95


async def dead_record(platform: Bench) -> dict[str, object]:
    (record,) = await platform.records(CALLBACKS_DEAD.name, 1)
    conform(record, "callback-dead")
    assert isinstance(record, dict)
    return record


async def test_410_is_dead_at_once(platform: Bench, target: Target) -> None:
    """C6: a 410 ends the callback after one call, and its dead letter gives the reason."""
    target.answer = answering(410)
    callback = make_callback(f"{target.url}/hook")
    async with platform.service():
        await platform.enqueue(callback)
        record = await dead_record(platform)
        await wait_until(lambda: _has_state(platform, callback.id, "dead"))
    assert record["error"] == {
        "kind": "HTTP",
        "message": "the target answered 410: it is gone, and its target is disabled",
        "status": 410,
        "excerpt": "this is 410",
    }
    assert len(target.calls) == 1


async def test_an_exhausted_schedule_ends_in_a_dead_letter(platform: Bench, target: Target) -> None:
    """C6: the last failed attempt writes the callback to `callbacks.dead`; its row is dead."""
    target.answer = answering(302, Location=target.url + "/elsewhere")
    callback = make_callback(f"{target.url}/hook")
    async with platform.service():
        await platform.enqueue(callback)
        record = await dead_record(platform)
        await wait_until(lambda: _has_state(platform, callback.id, "dead"))
    assert (record["id"], record["target"], record["task_id"]) == (callback.id, callback.target.url, 1)
    assert record["body"] == callback.body.decode()
    assert record["attempt"] == 3
    assert record["error"]["message"] == "the target answered 302; attempt 3 was the last"  # type: ignore[index]  # JSON
    # C7: no redirect was followed.
    assert [call.path for call in target.calls] == ["/hook"] * 3
    row = (await platform.rows())[callback.id]
    assert orjson.loads(row["error"]) == record["error"]


async def _has_state(platform: Bench, callback_id: str, state: str) -> bool:
    return (await platform.rows())[callback_id]["state"] == state


@pytest.mark.parametrize(
    "target_url",
    ["ftp://files.example/x", "http://" + "a" * 70 + ".b/"],
)
async def test_a_callback_without_a_valid_target_is_dead_at_once(
    platform: Bench, target: Target, target_url: str
) -> None:
    """C6: an invalid target URL makes a dead letter with the reason; other callbacks go on."""
    async with platform.service():
        await platform.enqueue(make_callback(target_url, 1), make_callback(f"{target.url}/hook", 2))
        record = await dead_record(platform)
        await wait_until(lambda: _has_state(platform, make_callback("", 2).id, "delivered"))
    assert record["error"]["kind"] == "Target"  # type: ignore[index]  # JSON


async def test_a_refused_connection_is_retried(platform: Bench) -> None:
    """C6: a refused connection is recorded, and the callback is scheduled again."""
    callback = make_callback(f"http://127.0.0.1:{closed_port()}/hook")
    async with platform.service(callback_schedule_s=("600",)):
        await platform.enqueue(callback)
        row = await wait_until(lambda: _failed(platform, callback.id))
    assert orjson.loads(row["error"])["kind"] == "Connection"
    assert (row["state"], row["attempt"]) == ("pending", 1)
    # Jitter subtracts a fifth at most.
    assert 470 < row["due_in_s"] <= 600


async def _failed(platform: Bench, callback_id: str):
    row = (await platform.rows())[callback_id]
    return row if row["error"] else None


async def test_headers_that_a_target_echoes_are_masked(platform: Bench, target: Target) -> None:
    """C7: the service masks values of the callback's headers in the excerpt of an answer."""

    async def echo(request: web.Request) -> web.Response:
        text = f"you said {request.headers['Authorization']}, or abcdefgh"
        return web.Response(status=410, text=text.ljust(EXCERPT_BYTES - 5, ".") + "abcdefgh")

    target.answer = echo
    async with platform.service():
        await platform.enqueue(
            make_callback(f"{target.url}/hook", headers={"Authorization": "Bearer abcdefgh"})
        )
        record = await dead_record(platform)
    excerpt = record["error"]["excerpt"]  # type: ignore[index]  # JSON
    # Also the part of a value at which the excerpt ends.
    assert excerpt.replace(".", "") == "you said ***, or ********"


async def test_a_duplicated_record_makes_one_call(platform: Bench, target: Target) -> None:
    """C1: a duplicate record causes no second call, before or after the delivery."""
    callback = make_callback(f"{target.url}/hook")
    marker = make_callback(f"{target.url}/hook", 2)
    async with platform.service():
        await platform.enqueue(callback, publish=False)
        await platform.publish(*[callback] * 20)
        await wait_until(platform.all_delivered)
        await platform.publish(*[callback] * 20)
        # The marker has the same record key, so it follows all duplicates in their partition.
        await platform.enqueue(marker)
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id, marker.id]


async def test_a_record_without_a_row_makes_no_call(platform: Bench, target: Target) -> None:
    """C7: the service calls no target for a record without a row."""
    await platform.publish(make_callback(f"{target.url}/hook", 1))
    async with platform.service():
        await platform.enqueue(make_callback(f"{target.url}/hook", 2))
        await wait_until(platform.all_delivered)
    assert target.ids() == [make_callback("", 2).id]


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b'{"id":"x","target":"http://x/","task_id":1,"attempt":99999999999,"body":""}',
    ],
)
async def test_a_malformed_record_is_rejected(platform: Bench, target: Target, value: bytes) -> None:
    """T5, C1: the record goes to `callbacks.rejected` with a reason, and the next is delivered."""
    callback = make_callback(f"{target.url}/hook")
    async with platform.service():
        await platform.send(value, callback.target.url.encode())
        await platform.enqueue(callback)
        await wait_until(platform.all_delivered)
        (rejected,) = await platform.records(CALLBACKS_REJECTED.name, 1)
    conform(rejected, "rejected")
    assert rejected["topic"].endswith(".callbacks")


async def test_hostile_callbacks_change_nothing(platform: Bench, target: Target) -> None:
    """T5, C1: hostile entries beside callbacks in one record, and hostile records, end no service.
    Each callback is delivered at its first attempt."""
    callbacks = [make_callback(f"{target.url}/hook", number) for number in range(1, 5)]
    good = [callback.encode() for callback in callbacks]
    entry = orjson.loads(good[0])
    hostile = [
        b'{"id":"\\ud800"}',
        b"NaN",
        b"[" * 2_000 + b"]" * 2_000,
        b'"\xff"',
        orjson.dumps({**entry, "id": "i" * 100_000}),
        orjson.dumps({**entry, "id": "a\r\nb: c"}),
        orjson.dumps({**entry, "id": "unknown", "target": "http://x/" + "\u6f22" * 1_900}),
        orjson.dumps({**entry, "id": "unknown", "headers": {"a\r\nb": "c\r\nd"}}),
        orjson.dumps({**entry, "id": "unknown", "task_id": 2**63}),
        orjson.dumps({**entry, "id": "unknown", "body": "--" + "[" * 5_000}),
    ]
    async with platform.service():
        await platform.enqueue(*callbacks, publish=False)
        record = [good[0], *hostile[:5], good[1], *hostile[5:], good[2]]
        await platform.send(b"[%b]" % b",".join(record))
        for value in (
            b"",
            b"[]",
            b"[[[",
            b"[%b]" % b",".join([b"0"] * 20_000),
            b"[%b]" % b",".join([b"0"] * 500),
        ):
            await platform.send(value)
        await platform.send(good[3], callbacks[3].target.url.encode())
        await wait_until(platform.all_delivered)
        # Seven entries of the first record, and the five records.
        rejected = await platform.records(CALLBACKS_REJECTED.name, 12)
    assert any("500 entries break the contract" in each["reason"] for each in rejected)
    assert Counter(target.ids()) == Counter(callback.id for callback in callbacks)
    assert {row["attempt"] for row in (await platform.rows()).values()} == {1}


async def test_a_missing_record_is_published_when_its_row_is_due(platform: Bench, target: Target) -> None:
    """C1, O1: the requeuer publishes a row whose record a crash prevented."""
    callback = make_callback(f"{target.url}/hook")
    await platform.enqueue(callback, publish=False, due_in_s=1.0)
    async with platform.service():
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id]


async def test_cut_database_connections_lose_no_callback(platform: Bench, target: Target) -> None:
    """O1: callbacks survive three cuts of all database connections, each under its own id."""
    callbacks = [make_callback(f"{target.url}/h{number % 7}", number) for number in range(1, 301)]

    async def cut_connections() -> None:
        await platform.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'penstock callbacks'"
        )

    async with platform.service(callback_timeout_s=0.5, callback_slots=20):
        await platform.enqueue(*callbacks, due_in_s=1.0)
        for batch in range(1, 4):
            await wait_until(lambda batch=batch: len(target.calls) >= 50 * batch)
            await cut_connections()
        await wait_until(platform.all_delivered)
    assert set(target.ids()) == {callback.id for callback in callbacks}


async def test_an_idle_service_does_not_poll_the_database(platform: Bench) -> None:
    """C1: with no callback due, the requeuer sleeps and does not poll PostgreSQL."""
    await platform.enqueue(make_callback("http://127.0.0.1:9/far", 1), publish=False, due_in_s=600)

    async with platform.service(callback_timeout_s=10.0):
        await wait_until(lambda: _requeuer_sleeps(platform), what="the requeuer waits for the next callback")

        async def quiet() -> bool:
            """Ten of the requeuer's shortest intervals: a busy loop would have polled again."""
            query_starts = await _query_starts(platform)
            try:
                await wait_until(lambda: _has_queried(platform, query_starts), timeout=2.0)
            except TimeoutError:
                return True
            return False

        # Other sessions may still send their first queries.
        await wait_until(quiet, what="no session queries PostgreSQL for two seconds")


async def _query_starts(platform: Bench) -> set[object]:
    rows = await platform.connection.fetch(
        "SELECT pid, query_start FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'penstock callbacks%'"
    )
    return {tuple(row) for row in rows}


async def _has_queried(platform: Bench, query_starts: set[object]) -> bool:
    return await _query_starts(platform) != query_starts


async def _requeuer_sleeps(platform: Bench) -> bool:
    return bool(
        await platform.connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'penstock callbacks requeuer' AND state = 'idle' AND query LIKE '%min(due_at)%'"
        )
    )
