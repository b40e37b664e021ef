"""Callbacks and their targets over HTTP: what operators request, and the effect on the callbacks
service."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.callback_targets import Bench, Target, answering, bench, make_callback
from tests.support.gateways import Caller, running_gateway
from tests.support.waiting import wait_until

from penstock.contracts.event import Callback
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS
from penstock.postgres.connection import connect
from penstock.postgres.queries import bound

A, B = "https://a.example/hook", "https://b.example/hook?x=1&y=%2F"
QUICK_SETTINGS = {"callback_schedule_s": ("0.05", "0.05"), "callback_drain_rate": 200.0}


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as made:
        await create_topics(made.kafka, [EVENTS])
        yield made


@pytest.fixture
async def gateway(platform: Bench, tmp_path: Path) -> AsyncIterator[Caller]:
    async with running_gateway(
        kafka=platform.kafka.kafka,
        prefix=platform.kafka.prefix,
        postgres=platform.postgres,
        objects=f"file://{tmp_path}",
    ) as caller:
        yield caller


async def insert_callbacks(
    platform: Bench, url: str, numbers: Sequence[int], state: str = "pending", **columns: Any
) -> None:
    """Inserts callbacks without records, as if the service were down."""
    callbacks = [make_callback(url, number, headers={"X-Token": "s3cr3t"}) for number in numbers]
    await platform.enqueue(*callbacks, publish=False, due_in_s=600)
    columns = {
        "state": state,
        **({"finished_at": datetime.now(UTC)} if state in ("dead", "delivered") else {}),
    } | columns
    for name, value in columns.items():
        await platform.connection.execute(
            f"UPDATE callback SET {name} = $1 WHERE id = ANY ($2)", value, [one.id for one in callbacks]
        )


async def all_pages(gateway: Caller, path: str, name: str, limit: int, **query: str) -> list[Any]:
    found: list[Any] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await gateway.get(path, params={**query, **cursor, "limit": str(limit)})
        assert answer.status == 200, answer.body
        assert len(answer.body[name]) <= limit
        found += answer.body[name]
        if answer.body["next"] is None:
            return found
        cursor = {"cursor": answer.body["next"]}


async def test_targets_are_listed_with_their_backlog(gateway: Caller, platform: Bench) -> None:
    """C8: pages of one list every target once, by state, prefix and URL. The backlog counts each
    path and held callbacks apart."""
    await insert_callbacks(platform, A, range(1, 4))
    await insert_callbacks(platform, A, range(11, 16), attempt=2)
    await insert_callbacks(platform, A, range(21, 28), state="held")
    await insert_callbacks(platform, B, [31])
    for url, state in ((A, "abnormal"), (B, "normal"), ("https://c.example/", "normal")):
        await platform.connection.execute(
            "INSERT INTO callback_target (url, state) VALUES ($1, $2)", url, state
        )
    listed = await all_pages(gateway, "/targets", "targets", 1)
    assert [one["url"] for one in listed] == [A, B, "https://c.example/"]
    assert listed[0]["backlog"] == {"normal": 3, "diverted": 5, "held": 7, "complete": True}
    assert listed[1]["backlog"] == {"normal": 1, "diverted": 0, "held": 0, "complete": True}

    async def urls(**query: str) -> list[str]:
        return [one["url"] for one in (await gateway.get("/targets", params=query)).body["targets"]]

    assert await urls(state="abnormal") == [A]
    assert await urls(prefix="https://b.ex") == [B]
    # `%` and `_` match only themselves.
    assert await urls(prefix="https://%") == []
    assert await urls(url=B) == [B]
    assert await urls(url=B, state="abnormal") == []
    assert await urls(url="https://a.example/") == []
    for wrong in ({"state": "ill"}, {"limit": "101"}, {"url": ""}, {"sate": "normal"}):
        assert (await gateway.get("/targets", params=wrong)).status == 422


async def test_backlog_counts_are_bounded(
    gateway: Caller, platform: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: beyond the limit of a query, the counts are lower bounds and `complete` is false."""
    await insert_callbacks(platform, A, range(1, 11), state="held")
    await platform.connection.execute("INSERT INTO callback_target (url) VALUES ($1)", A)
    monkeypatch.setattr("penstock.postgres.targets.HELD_COUNTED", 10)
    [found] = (await gateway.get("/targets")).body["targets"]
    assert (found["backlog"]["held"], found["backlog"]["complete"]) == (10, False)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.postgres.targets.PENDING_SEARCHED", 3)
    await insert_callbacks(platform, A, range(11, 15))
    [found] = (await gateway.get("/targets")).body["targets"]
    assert (found["backlog"]["normal"], found["backlog"]["complete"]) == (3, False)


async def plan_of(platform: Bench, text: str, *arguments: Any) -> str:
    """The generic plan, which a long-lived connection uses."""
    connection = await connect(platform.postgres, "test")
    try:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        rows = await connection.fetch(f"EXPLAIN {text}", *arguments)
    finally:
        await connection.close()
    return "\n".join(row[0] for row in rows)


CALLBACK_QUERIES: list[tuple[tuple[Any, ...], str]] = [
    (
        bound("targets.backlog", namespace=["acme"], url=[A], most_pending=10, most_held=10),
        "callback_due callback_held_of",
    ),
    (
        bound("replay.find_dead", after_target=A, after_seq=0, since=None, until=None, limit=10),
        "callback_dead",
    ),
    (
        bound("replay.find_dead_of_target", target=A, after_seq=0, since=None, until=None, limit=10),
        "callback_dead",
    ),
    (
        bound(
            "replay.find_dead_within",
            after_target=A,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            namespaces=["acme"],
        ),
        "callback_dead_of",
    ),
    (
        bound(
            "replay.find_dead_of_target_within",
            target=A,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            namespaces=["acme"],
        ),
        "callback_dead_of",
    ),
    (
        bound("replay.find_held", after_target=A, after_seq=0, since=None, until=None, limit=10),
        "callback_held",
    ),
    (
        bound("replay.find_held_of_target", target=A, after_seq=0, since=None, until=None, limit=10),
        "callback_held",
    ),
    (
        bound(
            "replay.find_held_within",
            after_target=A,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            namespaces=["acme"],
        ),
        "callback_held_of",
    ),
    (
        bound(
            "replay.find_held_of_target_within",
            target=A,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            namespaces=["acme"],
        ),
        "callback_held_of",
    ),
    (
        bound(
            "replay.find_of_task",
            task_id=1,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            state=None,
            target=None,
            namespaces=["acme"],
        ),
        "callback_task",
    ),
    (
        bound(
            "replay.find_ids", ids=["x"], state=None, since=None, until=None, limit=10, namespaces=["acme"]
        ),
        "callback_pkey",
    ),
    (
        bound(
            "replay.find_pending",
            after_target=A,
            after_seq=0,
            since=None,
            until=None,
            limit=10,
            examined=10,
            target=None,
            namespaces=["acme"],
        ),
        "callback_due",
    ),
    (
        bound("replay.replay", id=["x"], due_in=[0.0], state="dead", namespace=["acme"], target=[A]),
        "callback_pkey",
    ),
]


async def test_callback_queries_use_indexes(platform: Bench) -> None:
    """C8: queries for callbacks and for replays neither scan the whole table nor sort unbounded
    rows."""
    async with asyncio.timeout(120):
        rows = await platform.connection.fetch(
            "INSERT INTO callback (id, namespace, target, task_id, body, due_at, state, finished_at) "
            "SELECT 'x' || n, (ARRAY['acme', 'beta', 'default'])[1 + n % 3], 'https://' || n % 50 || '.example/', n, '{}', now(), "
            "(ARRAY['pending', 'held', 'dead', 'delivered'])[1 + n % 4], now() "
            "FROM generate_series(1, 4000) AS n RETURNING 1"
        )
        await platform.connection.execute("ANALYZE callback")
    assert len(rows) == 4000
    for statement, index in CALLBACK_QUERIES:
        plan = await plan_of(platform, *statement)
        assert "Seq Scan on callback" not in plan, plan
        assert "Seq Scan on task" not in plan, plan
        for index_name in index.split():
            assert f"using {index_name} " in plan or f"on {index_name} " in plan, (statement, plan)


TARGET_QUERIES: list[tuple[tuple[Any, ...], str]] = [
    (
        bound(
            "targets.find",
            after_namespace="",
            after_url="",
            from_url="https://h7.",
            until_url="https://h7/",
            limit=10,
            state=None,
        ),
        "url",
    ),
    (
        bound(
            "targets.find",
            after_namespace="acme",
            after_url="https://h7.",
            from_url="",
            until_url="\x7f",
            limit=10,
            state="normal",
        ),
        "url",
    ),
    (
        bound(
            "targets.find_in_state",
            after_namespace="",
            after_url="",
            from_url="",
            until_url="\x7f",
            limit=10,
            state="abnormal",
        ),
        "troubled",
    ),
    (
        bound(
            "targets.find_within",
            after_namespace="",
            after_url="",
            from_url="https://h7.",
            until_url="https://h7/",
            limit=10,
            state=None,
            namespaces=["acme", "beta"],
        ),
        "pkey",
    ),
    (
        bound(
            "targets.find_in_state_within",
            after_namespace="",
            after_url="",
            from_url="",
            until_url="\x7f",
            limit=10,
            state="disabled",
            namespaces=["acme"],
        ),
        "troubled",
    ),
    (bound("targets.get", "https://h7.example/7", ["acme"]), "url"),
    (bound("targets.disabled", ["acme"], ["https://h7.example/7"]), "troubled"),
    (bound("targets.find_abnormal", "", "", 1000), "troubled"),
    (
        bound(
            "targets.delete_unused",
            after_namespace="acme",
            after_url="https://h7.",
            limit=1000,
            unused_s=60.0,
        ),
        "url",
    ),
    (
        bound(
            "targets.save",
            owner="me",
            namespace=["acme"],
            url=[A],
            abnormal=[True],
            count=[1],
            slow_at_s=[1.0],
            called_at_s=[1.0],
            failures=[1],
            attempts=["[]"],
        ),
        "url",
    ),
]


async def test_target_queries_use_indexes(platform: Bench) -> None:
    """C8: no query for targets scans the whole table, which has 20,000 targets, two of them
    troubled."""
    await platform.connection.execute(
        "INSERT INTO callback_target (namespace, url, state) "
        "SELECT (ARRAY['acme', 'beta', 'default'])[1 + n % 3], 'https://h' || n % 100 || '.example/' || n, "
        "CASE n WHEN 7 THEN 'abnormal' WHEN 8 THEN 'disabled' ELSE 'normal' END FROM generate_series(1, 20000) AS n"
    )
    await platform.connection.execute("ANALYZE callback_target")
    for statement, index in TARGET_QUERIES:
        plan = await plan_of(platform, *statement)
        assert "Seq Scan on callback_target" not in plan, plan
        # Two partial indexes have names with this beginning; the planner may use either.
        found = f"callback_target_{index}" if index == "troubled" else f"callback_target_{index} "
        assert f"using {found}" in plan or f"on {found}" in plan, (statement, plan)


async def test_a_prefix_finds_every_matching_target(gateway: Caller, platform: Bench) -> None:
    """C8: a prefix matches to the character, in the order of code points and over pages, under any
    collation of the database."""
    urls = [
        f"https://{host}"
        for host in (
            "a.example/",
            "a.example/B",
            "a.example/a",
            "a.example/~",
            "a.example/ä",
            "a.example0",
            "A/",
        )
    ]
    await platform.connection.executemany(
        "INSERT INTO callback_target (url) VALUES ($1)", [(url,) for url in urls]
    )

    async def found(limit: int = 2, **query: str) -> list[str]:
        return [one["url"] for one in await all_pages(gateway, "/targets", "targets", limit, **query)]

    assert await found() == sorted(urls)
    assert await found(prefix="https://a.example/") == sorted(urls[:5])
    assert await found(prefix="https://a.example", state="normal") == sorted(urls[:6])
    assert await found(prefix="https://a.example/ä") == [urls[4]]
    assert await found(prefix="https://a.example/b") == []


async def test_an_operator_disables_limits_and_enables_a_target(
    gateway: Caller, platform: Bench, target: Target
) -> None:
    """C8: the callbacks of a disabled target are held, and delivered once it is enabled. The rate
    and the reason are shown."""
    url = f"{target.url}/hook"
    assert (await gateway.post("/targets/enable", {"url": url})).status == 404
    assert (await gateway.post("/targets/enable", {"url": "hook"})).pointers == ["/url"]
    answer = (await gateway.post("/targets/disable", {"url": url, "why": "until noon"})).body
    assert answer["changed"] is True
    assert (answer["target"]["state"], answer["target"]["why"]) == ("disabled", "until noon")
    assert (await gateway.post("/targets/disable", {"url": url, "why": "again"})).body["changed"] is False
    async with platform.service(**QUICK_SETTINGS):
        await platform.enqueue(*[make_callback(url, number) for number in range(1, 6)])
        await wait_until(lambda: _states(platform, held=5))
        assert not target.calls
        limited = (await gateway.post("/targets/limit", {"url": url, "rate": 100})).body["target"]
        assert (limited["rate"], limited["backlog"]["held"]) == (100, 5)
        assert (await gateway.post("/targets/enable", {"url": url})).body["target"]["why"] is None
        await wait_until(platform.all_delivered)
    [shown] = (await gateway.get("/targets", params={"url": url})).body["targets"]
    assert shown["state"] == "normal"
    assert {one["status"] for one in shown["attempts"]} == {200}
    assert abs(datetime.fromisoformat(shown["attempts"][-1]["at"]) - datetime.now(UTC)) < timedelta(minutes=1)
    unlimited = (await gateway.post("/targets/limit", {"url": url, "rate": None})).body["target"]
    assert unlimited["rate"] is None
    for wrong in ({"url": "shop.example"}, {"url": url, "rate": 0}, {"url": url}):
        assert (await gateway.post("/targets/limit", wrong)).status == 422


async def _states(platform: Bench, **expected: int) -> bool:
    return await platform.states() == Counter(expected)


async def test_callbacks_are_listed(gateway: Caller, platform: Bench) -> None:
    """C6, C8: the list has dead callbacks by default, over pages, and filters by target, state,
    task and time. It shows no header value and no body."""
    await insert_callbacks(
        platform, B, [1, 2, 3], state="dead", error='{"kind": "status", "message": "status 500"}'
    )
    await insert_callbacks(platform, A, [4, 5], state="dead", finished_at=datetime(2026, 1, 1, tzinfo=UTC))
    await insert_callbacks(platform, A, [6], state="held")
    await insert_callbacks(platform, A, [7, 8])
    await insert_callbacks(platform, B, [9], state="delivered")

    async def tasks(**query: str) -> list[int]:
        return [one["task_id"] for one in await all_pages(gateway, "/callbacks", "callbacks", 2, **query)]

    assert await tasks() == [4, 5, 1, 2, 3]
    assert await tasks(target=B) == [1, 2, 3]
    assert await tasks(until="2026-01-02T00:00:00Z") == [4, 5]
    assert await tasks(target=A, since="2026-01-02T00:00:00Z") == []
    assert await tasks(state="held") == await tasks(state="held", target=A) == [6]
    assert await tasks(state="pending") == [7, 8]
    assert await tasks(state="pending", target=B) == []
    assert await tasks(task_id="9") == await tasks(task_id="9", state="delivered") == [9]
    assert await tasks(task_id="9", state="dead") == await tasks(task_id="9", target=A) == []
    assert await tasks(id="msg_9-0-0-succeeded-0") == [9]
    answer = await gateway.get("/callbacks", params={"target": B})
    assert answer.body["callbacks"][0]["error"]["message"] == "status 500"
    assert "s3cr3t" not in str(answer.body)
    for wrong in ({"state": "delivered"}, {"since": "yesterday"}, {"since": "2026-01-01"}, {"cursor": "x"}):
        assert (await gateway.get("/callbacks", params=wrong)).status == 422


async def test_a_replayed_callback_gets_a_new_schedule(
    gateway: Caller, platform: Bench, target: Target
) -> None:
    """C6: a replay keeps id, body and headers, and starts a new schedule: after three failed
    attempts, attempt 4 may fail and attempt 5 delivers. A second replay changes nothing."""
    url = f"{target.url}/hook"
    target.answer = answering(500, 500, 500, 500, 200)
    callback = make_callback(url, 1, headers={"X-Token": "s3cr3t"})
    async with platform.service(**QUICK_SETTINGS):
        await platform.enqueue(callback)
        await wait_until(lambda: _states(platform, dead=1))
        assert len(target.calls) == 3
        preview = (await gateway.post("/callbacks/replay", {"target": url, "dry_run": True})).body
        assert (preview["replayed"], preview["held"], preview["dry_run"]) == (1, 0, True)
        assert [one["id"] for one in preview["examples"]] == [callback.id]
        assert await platform.states() == {"dead": 1}
        answer = (await gateway.post("/callbacks/replay", {"ids": [callback.id]})).body
        assert (answer["replayed"], answer["held"], answer["more"]) == (1, 0, False)
        assert (await gateway.post("/callbacks/replay", {"ids": [callback.id]})).body["replayed"] == 0
        await wait_until(platform.all_delivered)
    row = (await platform.rows())[callback.id]
    assert (row["attempt"], row["replayed_after"], row["error"]) == (5, 3, None)
    assert target.ids() == [callback.id] * 5
    assert {call.headers["X-Token"] for call in target.calls} == {"s3cr3t"}
    assert {call.body for call in target.calls} == {callback.body}


async def test_a_replayed_callback_is_dead_after_a_whole_schedule(
    gateway: Caller, platform: Bench, target: Target
) -> None:
    """C6: each replay makes three more attempts, and the callback is dead after each schedule
    fails."""
    url = f"{target.url}/hook"
    target.answer = answering(500)
    async with platform.service(**QUICK_SETTINGS):
        await platform.enqueue(make_callback(url))
        for calls in (3, 6, 9):
            await wait_until(lambda: _states(platform, dead=1))
            assert len(target.calls) == calls
            assert (await gateway.post("/callbacks/replay", {"target": url})).body["replayed"] == 1
        await wait_until(lambda: len(target.calls) == 12)
        await wait_until(lambda: _states(platform, dead=1))


async def test_a_replay_to_a_disabled_target_is_held(
    gateway: Caller, platform: Bench, target: Target
) -> None:
    """C6: after a 410 a replay reports all callbacks as held, and enabling the target delivers
    them."""
    url = f"{target.url}/hook"
    target.answer = answering(410, 200)
    async with platform.service(**QUICK_SETTINGS):
        await platform.enqueue(make_callback(url))
        await wait_until(lambda: _states(platform, dead=1))
        preview = (await gateway.post("/callbacks/replay", {"task_id": 1, "dry_run": True})).body
        assert (preview["held"], preview["disabled"]) == (1, [url])
        answer = (await gateway.post("/callbacks/replay", {"task_id": 1})).body
        assert (answer["replayed"], answer["held"], answer["disabled"]) == (1, 1, [url])
        assert await platform.states() == {"held": 1}
        assert len(target.calls) == 1
        assert (await gateway.post("/targets/enable", {"url": url})).body["changed"] is True
        await wait_until(platform.all_delivered)


async def test_a_replay_keeps_its_rate_and_limit(
    gateway: Caller, platform: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C6: a replay makes ten callbacks a second due, from its start and over batches. `more`
    is true until all are replayed."""
    monkeypatch.setattr("penstock.gateway.callbacks.BATCH_SIZE", 7)
    await insert_callbacks(platform, A, range(1, 31), state="dead")
    await insert_callbacks(platform, B, range(31, 36), state="dead")
    first = (await gateway.post("/callbacks/replay", {"target": A, "rate": 10, "limit": 20})).body
    assert (first["replayed"], first["more"]) == (20, True)
    second = (
        await gateway.post("/callbacks/replay", {"target": A, "rate": 10, "limit": 20, "start_in_s": 2})
    ).body
    assert (second["replayed"], second["more"]) == (10, False)
    rows = await platform.rows()
    due_s = sorted(row["due_in_s"] for row in rows.values() if row["target"] == A)
    # Each request counts from its own start; the bounds allow a second of delay for each.
    assert 1.5 < due_s[-1] - due_s[0] < 5
    assert all(later > earlier for earlier, later in pairwise(due_s))
    assert {row["state"] for row in rows.values() if row["target"] == B} == {"dead"}


async def test_a_delivered_callback_is_replayed_by_id_only(
    gateway: Caller, platform: Bench, target: Target
) -> None:
    """C6: a delivered callback is sent again when its id is given, and by no filter."""
    url = f"{target.url}/hook"
    callback: Callback = make_callback(url)
    async with platform.service(**QUICK_SETTINGS):
        await platform.enqueue(callback)
        await wait_until(platform.all_delivered)
        assert (await gateway.post("/callbacks/replay", {"ids": [callback.id]})).body["replayed"] == 0
        refused = await gateway.post("/callbacks/replay", {"target": url, "state": "delivered"})
        assert (refused.status, refused.pointers) == (422, ["/state"])
        assert (await gateway.post("/callbacks/replay", {})).status == 422
        again = await gateway.post("/callbacks/replay", {"ids": [callback.id], "state": "delivered"})
        assert again.body["replayed"] == 1
        await wait_until(lambda: len(target.calls) == 2)
        await wait_until(platform.all_delivered)
    assert target.ids() == [callback.id] * 2


async def test_a_stale_outcome_does_not_change_a_replayed_callback(platform: Bench) -> None:
    """C6: an outcome that is recorded again after a lost answer does not change a callback that was
    replayed meanwhile."""
    await insert_callbacks(platform, A, [1], state="dead", attempt=3)
    callback_id = make_callback(A, 1).id
    pool = platform.connection
    assert await pool.fetch(
        *bound(
            "replay.replay", id=[callback_id], due_in=[600.0], state="dead", namespace=["default"], target=[A]
        )
    )
    outcomes = {"id": [callback_id], "attempt": [3], "state": ["dead"], "error": ["{}"], "due_in": [0.0]}
    outcomes |= {"spent": [0], "row": [uuid.uuid4()], "callback_id": [callback_id]}
    outcomes |= {"topic": ["callbacks.dead"], "key": [A.encode()], "value": [b"{}"]}
    assert await pool.fetch(*bound("callbacks.record_outcomes", **outcomes)) == []
    assert await platform.states() == {"pending": 1}
    assert await pool.fetchval("SELECT count(*) FROM callback_outbox") == 0
