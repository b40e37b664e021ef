"""The callbacks service against a real Kafka, a real PostgreSQL and a target that answers as told."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import orjson
import pytest
from aiohttp import web
from standardwebhooks import Webhook
from tests.callback_targets import (
    OLD_SECRET,
    SECRET,
    Bench,
    Target,
    answering,
    owed,
)
from tests.waiting import wait_until

from penstock import __version__
from penstock.contracts.validation import conform
from penstock.kafka.topics import CALLBACKS_DEAD, CALLBACKS_REJECTED


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def test_a_callback_is_delivered_signed(platform: Bench, target: Target) -> None:
    """C1, C7: the body arrives to the byte, and whoever knows either active secret can verify it."""
    callback = owed(f"{target.url}/hook")
    async with platform.service(callback_secrets=(SECRET, OLD_SECRET)):
        await platform.owe(callback)
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


async def test_what_fails_is_retried_with_the_same_id(platform: Bench, target: Target) -> None:
    """C6, guarantee 5: 500 twice, then 200: delivered at the third attempt, all with one id, signed anew."""
    target.answer = answering(500, 500, 200)
    callback = owed(f"{target.url}/hook")
    async with platform.service():
        await platform.owe(callback)
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id] * 3
    for call in target.calls:
        Webhook(SECRET).verify(call.body, call.headers)
    assert (await platform.rows())[callback.id]["attempt"] == 3


async def test_retry_after_is_a_floor(platform: Bench, target: Target) -> None:
    """C6: a target that asks for two seconds gets them, though the schedule says 0.3."""
    target.answer = answering(503, 200, **{"Retry-After": "2"})
    async with platform.service():
        await platform.owe(owed(f"{target.url}/hook"))
        await wait_until(platform.all_delivered)
    first, second = target.calls
    assert second.at_s - first.at_s >= 1.95


async def test_retry_after_has_a_ceiling(platform: Bench, target: Target) -> None:
    """C6: a target that asks for ten years is asked again after the operator's ceiling."""
    target.answer = answering(503, 200, **{"Retry-After": "315360000"})
    async with platform.service(callback_retry_after_max_s=0.5):
        await platform.owe(owed(f"{target.url}/hook"))
        await wait_until(platform.all_delivered)
    assert len(target.calls) == 2


async def dead_record(platform: Bench) -> dict[str, object]:
    (record,) = await platform.records(CALLBACKS_DEAD.name, 1)
    conform(record, "callback-dead")
    assert isinstance(record, dict)
    return record


async def test_410_is_dead_at_once(platform: Bench, target: Target) -> None:
    """C6: one call, a dead letter that says why, no further attempt."""
    target.answer = answering(410)
    callback = owed(f"{target.url}/hook")
    async with platform.service():
        await platform.owe(callback)
        record = await dead_record(platform)
        await wait_until(lambda: _is(platform, callback.id, "dead"))
    assert record["error"] == {
        "kind": "HTTP",
        "message": "the target answered 410: it is gone, and its target is disabled",
        "status": 410,
        "excerpt": "this is 410",
    }
    assert len(target.calls) == 1


async def test_an_exhausted_schedule_ends_in_a_dead_letter(platform: Bench, target: Target) -> None:
    """C6: after the last attempt the callback is on `callbacks.dead`, whole, and its row is dead."""
    target.answer = answering(302, Location=target.url + "/elsewhere")
    callback = owed(f"{target.url}/hook")
    async with platform.service():
        await platform.owe(callback)
        record = await dead_record(platform)
        await wait_until(lambda: _is(platform, callback.id, "dead"))
    assert (record["id"], record["target"], record["task_id"]) == (callback.id, callback.target.url, 1)
    assert record["body"] == callback.body.decode()
    assert record["attempt"] == 3
    assert record["error"]["message"] == "the target answered 302; attempt 3 was the last"  # type: ignore[index]  # JSON
    # C7: no redirect was followed.
    assert [call.path for call in target.calls] == ["/hook"] * 3
    row = (await platform.rows())[callback.id]
    assert orjson.loads(row["error"]) == record["error"]


async def _is(platform: Bench, callback_id: str, state: str) -> bool:
    return (await platform.rows())[callback_id]["state"] == state


@pytest.mark.parametrize(
    "target_url",
    ["ftp://files.example/x", "not a url", "http://", "http://a..b/x", "http://" + "a" * 70 + ".b/"],
)
async def test_what_cannot_be_called_is_dead_at_once(
    platform: Bench, target: Target, target_url: str
) -> None:
    """C6: a target that is no URL gets a dead letter with the reason, and delays nobody."""
    async with platform.service():
        await platform.owe(owed(target_url, 1), owed(f"{target.url}/hook", 2))
        record = await dead_record(platform)
        await wait_until(lambda: _is(platform, owed("", 2).id, "delivered"))
    assert record["error"]["kind"] == "Target"  # type: ignore[index]  # JSON


async def test_a_target_that_is_not_there_is_retried(platform: Bench) -> None:
    """C6: a refused connection is written down and scheduled, not dead."""
    callback = owed(f"http://127.0.0.1:{closed_port()}/hook")
    async with platform.service(callback_schedule_s=("600",)):
        await platform.owe(callback)
        row = await wait_until(lambda: _failed(platform, callback.id))
    assert orjson.loads(row["error"])["kind"] == "Connection"
    assert (row["state"], row["attempt"]) == ("pending", 1)
    # Jitter takes a fifth at most.
    assert 470 < row["due_in_s"] <= 600


async def _failed(platform: Bench, callback_id: str):
    row = (await platform.rows())[callback_id]
    return row if row["error"] else None


async def test_a_target_that_does_not_speak_http_is_retried(platform: Bench) -> None:
    """C6: nonsense instead of an answer is an attempt that failed."""

    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        callback = owed(f"http://127.0.0.1:{port}/hook")
        async with platform.service(callback_schedule_s=("600",)):
            await platform.owe(callback)
            row = await wait_until(lambda: _failed(platform, callback.id))
    assert orjson.loads(row["error"])["kind"] == "Protocol"


async def test_a_target_that_hangs_is_given_up_at_the_timeout(platform: Bench, target: Target) -> None:
    """C7a: the deadline ends the call, and the attempt counts as failed."""
    hanging = asyncio.Event()

    async def hang(_request: web.Request) -> web.Response:
        await hanging.wait()
        return web.Response()

    target.answer = hang
    callback = owed(f"{target.url}/hook")
    async with platform.service(callback_timeout_s=0.5, callback_schedule_s=("600",)):
        await platform.owe(callback)
        row = await wait_until(lambda: _failed(platform, callback.id))
        await wait_until(lambda: target.ended == 1, timeout=5, what="the connection is closed")
    assert orjson.loads(row["error"]) == {
        "kind": "Timeout",
        "message": "the target did not answer within 0.5 s",
        "status": None,
        "excerpt": None,
    }


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("pause_s", [0.0, 0.2])
async def test_a_huge_or_endless_body_is_cut_off(
    platform: Bench, target: Target, status: int, pause_s: float
) -> None:
    """C7a: a body without end costs neither memory nor a slot: the status counts, the rest is not read."""
    sent = 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while True:
            await response.write(b"\0x" * (1 if pause_s else 32 * 1024))
            sent += 1
            await asyncio.sleep(pause_s)

    target.answer = pour
    callback = owed(f"{target.url}/hook")
    async with platform.service(callback_schedule_s=("600",)):
        await platform.owe(callback)
        await wait_until(lambda: target.ended == 1, timeout=10, what="the connection is closed")
        row = await wait_until(lambda: _settled(platform, callback.id))
    # What the sockets' buffers take, and no more.
    assert sent < 500
    assert row["state"] == ("delivered" if status == 200 else "pending")
    if status == 500:
        excerpt = orjson.loads(row["error"])["excerpt"]
        assert excerpt.startswith("\N{REPLACEMENT CHARACTER}x")
        assert len(excerpt) <= 1024


async def _settled(platform: Bench, callback_id: str):
    row = (await platform.rows())[callback_id]
    return row if row["error"] or row["state"] != "pending" else None


async def test_what_a_target_echoes_of_our_headers_is_not_kept(platform: Bench, target: Target) -> None:
    """C7: an answer that quotes the callback's own header does not bring its value into rows or dead letters."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=410, text=f"you said {request.headers['Authorization']}, or abcdefgh")

    target.answer = echo
    async with platform.service():
        await platform.owe(owed(f"{target.url}/hook", headers={"Authorization": "Bearer abcdefgh"}))
        record = await dead_record(platform)
    assert record["error"]["excerpt"] == "you said ***, or ***"  # type: ignore[index]  # JSON


async def test_a_record_that_comes_twice_makes_one_call(platform: Bench, target: Target) -> None:
    """C1: a duplicated record, early or late, and a record of an earlier attempt change nothing."""
    callback = owed(f"{target.url}/hook")
    late = owed(f"{target.url}/hook", 2)
    async with platform.service():
        await platform.owe(callback, publish=False)
        await platform.publish(*[callback] * 20)
        await wait_until(platform.all_delivered)
        await platform.publish(*[callback] * 20)
        # The same key, so the same partition: when this one is delivered, all before it were looked at.
        await platform.owe(late)
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id, late.id]


async def test_a_callback_nobody_owes_is_not_made(platform: Bench, target: Target) -> None:
    """C7: a record without a row, whoever wrote it, makes no call."""
    await platform.publish(owed(f"{target.url}/hook", 1))
    async with platform.service():
        await platform.owe(owed(f"{target.url}/hook", 2))
        await wait_until(platform.all_delivered)
    assert target.ids() == [owed("", 2).id]


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"\xff",
        b"",
        b"[]",
        b'{"id":"x","target":"http://x/","task_id":1,"attempt":-1,"body":""}',
        b'{"id":"x","target":"http://x/\\u0000","task_id":1,"attempt":0,"body":""}',
        b'{"id":"x","target":"http://x/","task_id":1,"attempt":99999999999,"body":""}',
    ],
)
async def test_a_malformed_record_is_parked(platform: Bench, target: Target, value: bytes) -> None:
    """T5, C1: it lands on `callbacks.rejected` with its reason, and the next one is delivered."""
    callback = owed(f"{target.url}/hook")
    async with platform.service():
        await platform.send(value, callback.target.url.encode())
        await platform.owe(callback)
        await wait_until(platform.all_delivered)
        (rejected,) = await platform.records(CALLBACKS_REJECTED.name, 1)
    conform(rejected, "rejected")
    assert rejected["topic"].endswith(".callbacks")


async def test_a_bad_callback_is_parked_and_the_others_of_its_record_are_delivered(
    platform: Bench, target: Target
) -> None:
    """T5, C1: a record carries many; one that breaks the contract costs only itself."""
    callbacks = [owed(f"{target.url}/hook", number) for number in range(1, 4)]
    entries = [orjson.loads(callback.encode()) for callback in callbacks]
    entries.insert(1, {**entries[0], "attempt": -1})
    async with platform.service():
        await platform.owe(*callbacks, publish=False)
        await platform.send(orjson.dumps(entries))
        await wait_until(platform.all_delivered)
        (rejected,) = await platform.records(CALLBACKS_REJECTED.name, 1)
    assert rejected["pointer"] == "/1/attempt"
    assert Counter(target.ids()) == Counter(callback.id for callback in callbacks)


async def test_a_record_that_was_never_written_is_made_good(platform: Bench, target: Target) -> None:
    """C1, O1: a crash between commit and publication leaves a row; when it is due its record is written."""
    callback = owed(f"{target.url}/hook")
    await platform.owe(callback, publish=False, due_in_s=1.0)
    async with platform.service():
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id]


async def test_a_hanging_target_holds_its_slots_only(platform: Bench, target: Target) -> None:
    """C5: with forty callbacks for a target that hangs, others are called at once, in the same partition too."""
    hanging = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/hangs":
            await hanging.wait()
        return web.Response()

    target.answer = answer
    async with platform.service(callback_slots=12, callback_target_slots=8):
        await platform.owe(*(owed(f"{target.url}/hangs", number) for number in range(1, 41)))
        await wait_until(lambda: target.under_way["/hangs"] == 8)
        healthy = [owed(f"{target.url}/h{number}", 100 + number) for number in range(30)]
        await platform.owe(*healthy)
        await wait_until(lambda: _all(platform, [c.id for c in healthy]), timeout=2.5)
        assert target.under_way["/hangs"] == 8
        hanging.set()
        await wait_until(platform.all_delivered)
    assert target.most_under_way["/hangs"] == 8


async def _all(platform: Bench, ids: list[str]) -> bool:
    rows = await platform.rows()
    return all(rows[callback_id]["state"] == "delivered" for callback_id in ids)


async def test_a_slow_targets_crowd_goes_back_and_comes_again(platform: Bench, target: Target) -> None:
    """C5: those who would wait too long for a slow target are in PostgreSQL meanwhile, and all are delivered."""
    fast = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.wait([asyncio.ensure_future(fast.wait())], timeout=0.5)
        return web.Response()

    target.answer = answer
    callbacks = [owed(f"{target.url}/slow", number) for number in range(1, 61)]
    async with platform.service(
        callback_target_slots=2, callback_patience_s=1.0, callback_postpone_s=2.0, callback_republish_s=1000.0
    ):
        # Not due for long: those that come due earlier went back.
        await platform.owe(*callbacks, due_in_s=1000.0)
        await wait_until(lambda: _went_back(platform, 50))
        fast.set()
        await wait_until(platform.all_delivered)
    assert Counter(target.ids()) == Counter(callback.id for callback in callbacks)


async def _went_back(platform: Bench, count: int) -> bool:
    rows = await platform.rows()
    return sum(row["attempt"] == 0 and row["due_in_s"] < 100 for row in rows.values()) >= count


async def test_the_service_survives_a_database_that_goes_away(platform: Bench, target: Target) -> None:
    """O1: connections cut in the middle lose nothing: what was begun is made again, with the same id."""
    callbacks = [owed(f"{target.url}/h{number % 7}", number) for number in range(1, 301)]

    async def cut() -> None:
        await platform.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'penstock callbacks'"
        )

    async with platform.service(
        callback_timeout_s=0.5, callback_horizon_s=1.0, callback_republish_s=1.0, callback_slots=20
    ):
        await platform.owe(*callbacks, due_in_s=1.0)
        for part in range(1, 4):
            await wait_until(lambda part=part: len(target.calls) >= 50 * part)
            await cut()
        await wait_until(platform.all_delivered)
    assert set(target.ids()) == {callback.id for callback in callbacks}


async def test_an_idle_service_hardly_asks(platform: Bench) -> None:
    """C1: with nothing due, the releaser sleeps instead of asking PostgreSQL again and again."""
    await platform.owe(owed("http://127.0.0.1:9/far", 1), publish=False, due_in_s=600)

    async with platform.service(callback_horizon_s=30.0):
        await wait_until(lambda: _sleeping(platform), what="the releaser looked for what is next")
        first = await _query_starts(platform)
        # Ten of the releaser's shortest intervals: one that span would have asked again.
        with pytest.raises(TimeoutError):
            await wait_until(lambda: _moved(platform, first), timeout=2.0)


async def _query_starts(platform: Bench) -> set[object]:
    rows = await platform.connection.fetch(
        "SELECT pid, query_start FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'penstock callbacks%'"
    )
    return {tuple(row) for row in rows}


async def _moved(platform: Bench, first: set[object]) -> bool:
    return await _query_starts(platform) != first


async def _sleeping(platform: Bench) -> bool:
    return bool(
        await platform.connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'penstock callbacks releaser' AND state = 'idle' AND query LIKE '%min(due_at)%'"
        )
    )
