"""Who may ask what: each role and each namespace against each route of the router, and keys over their lives."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.access import gateway_with_keys, make_key, sent
from tests.gateways import Caller, Proxy, running_gateway
from tests.waiting import wait_until

from penstock.core.access import ALLOWED, Action, Grant, Role, digest_of, token_of
from penstock.errors import Conflict, NotFound, PostgresUnavailable
from penstock.gateway import app as gateway_app
from penstock.gateway import audit as gateway_audit
from penstock.gateway import pages
from penstock.gateway.access import GRANT
from penstock.gateway.rules import RULES
from penstock.kafka.connection import create_topics, make_consumer, running
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS
from penstock.metrics.serving import readiness
from penstock.postgres import api_keys, audit
from penstock.settings import Kafka

FOREIGN, OWN = "beta--render", "acme--render"
NOBODYS_ID = 9_400_000
LEASE = {"worker": "w", "stage": "start", "step": 0, "attempt": 0}


class Things(NamedTuple):
    """What a namespace has."""

    type: str
    task: int
    operation: str
    callback: str
    url: str = "https://hook.example/"

    @property
    def namespace(self) -> str:
        """Of the type."""
        return self.type.partition("--")[0]


@pytest.fixture
async def routes(monkeypatch):
    """The routes of the router, as the gateway of this test hands them over to be checked for rules."""
    found: list[Any] = []
    check = gateway_app.require_rules

    def noting(routes):
        found.extend(routes)
        check(found)

    monkeypatch.setattr(gateway_app, "require_rules", noting)
    return found


@pytest.fixture
async def caller(routes, kafka_servers, prefix, database, tmp_path):
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        yield caller


async def call(caller: Caller, token: str | None, route: str, path: str, body: Any) -> Any:
    method = route.partition(" ")[0]
    more: dict[str, Any] = {} if body is None else {"json": body}
    headers = sent(token) if token else {}
    return await caller._call(method, path, headers=headers, **more)


async def things(caller: Caller, database: str, token: str, type_name: str) -> Things:
    """A type with a task, an operation about it, and a callback that is dead to a target that another namespace calls, too."""
    headers = sent(token)
    assert (await caller.post("/types", {"name": type_name}, headers=headers)).status == 201
    task = (await caller.post("/tasks", {"type": type_name, "context": 1}, headers=headers)).body["id"]
    asked = {"verb": "reprioritise", "priority": "HIGH", "by": "test", "filter": {"type": type_name}}
    operation = (await caller.post("/operations", asked, headers=headers)).body["id"]
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(
            "INSERT INTO penstock.callback (id, namespace, target, task_id, state, body, due_at, finished_at) "
            "VALUES ($1, $3, 'https://hook.example/', $2, 'dead', '', now(), now())",
            f"cb-{task}",
            task,
            type_name.partition("--")[0],
        )
        await connection.execute(
            "INSERT INTO penstock.callback_target (namespace, url, state, why) "
            "VALUES ($1, 'https://hook.example/', 'disabled', $2)",
            type_name.partition("--")[0],
            f"gone, says {type_name}",
        )
    finally:
        await connection.close()
    return Things(type_name, task, operation, f"cb-{task}")


# Routes that can also be asked what they would do.
REHEARSED = ("POST /callbacks/replay", "POST /operations")


def request_of(route: str, of: Things, *, dry: bool) -> tuple[str, Any]:
    """A request to a route about what somebody has, that would be taken; a new route needs one here."""
    name, task = of.type, of.task
    entry = {**LEASE, "id": task, "outcome": "progress"}
    del entry["worker"]
    target = {"url": of.url, "namespace": of.namespace}
    known: dict[str, tuple[str, Any]] = {
        "POST /tasks": ("/tasks", {"type": name, "context": None}),
        "GET /tasks": (f"/tasks?type={name}", None),
        "POST /tasks/states": ("/tasks/states", {"ids": [task]}),
        "POST /tasks/cancel": ("/tasks/cancel", {"ids": [task]}),
        "GET /tasks/{id}": (f"/tasks/{task}", None),
        "GET /tasks/{id}/why": (f"/tasks/{task}/why", None),
        "POST /tasks/{id}/cancel": (f"/tasks/{task}/cancel", None),
        "GET /backlog": (f"/backlog?type={name}", None),
        "GET /owners": ("/owners", None),
        "GET /types": ("/types", None),
        "GET /types/{name}": (f"/types/{name}", None),
        "POST /types": ("/types", {"name": name}),
        "PATCH /types/{name}": (f"/types/{name}", {"paused": False}),
        "GET /types/{name}/keys": (f"/types/{name}/keys", None),
        "POST /types/{name}/keys": (f"/types/{name}/keys", {"key": "k", "weight": 2}),
        "POST /types/{name}/keys/reset": (f"/types/{name}/keys/reset", {"key": "k"}),
        "GET /targets": (f"/targets?url={of.url}&namespace={of.namespace}", None),
        "POST /targets/disable": ("/targets/disable", {**target, "why": "test"}),
        "POST /targets/enable": ("/targets/enable", target),
        "POST /targets/limit": ("/targets/limit", {**target, "rate": 1.0}),
        "GET /callbacks": (f"/callbacks?id={of.callback}", None),
        "POST /callbacks/replay": ("/callbacks/replay", {"ids": [of.callback], "dry_run": dry}),
        "POST /operations": (
            "/operations",
            {"verb": "pause", "by": "test", "filter": {"ids": [task]}, "dry_run": dry},
        ),
        "GET /operations": ("/operations", None),
        "GET /operations/{id}": (f"/operations/{of.operation}", None),
        "POST /operations/{id}/stop": (f"/operations/{of.operation}/stop", {"by": "test"}),
        "POST /hold_task": ("/hold_task", {"worker": "w", "type": name, "wait_s": 0}),
        "POST /set_task": ("/set_task", {"worker": "w", "results": [entry]}),
        "GET /": ("/", None),
        "GET /docs": ("/docs", None),
        "GET /openapi.json": ("/openapi.json", None),
        "GET /healthz": ("/healthz", None),
        "GET /livez": ("/livez", None),
        "GET /readyz": ("/readyz", None),
    }
    return known[route]


def without(value: Any, of: Things) -> Any:
    """An answer without what names the things it is about, so that answers about different things can be compared."""
    text = repr(value)
    for name in (of.type, str(of.task), of.operation, of.callback, f"namespace {of.namespace}:"):
        text = text.replace(name, "?")
    # What is made by the request itself: an operation's id and its moments.
    return re.sub(r"\b[0-9a-f]{32}\b|\d{4}-\d\d-\d\dT[\d:.]+Z", "?", text)


async def test_every_role_and_namespace_against_every_route(caller, routes, database):
    """O5: for each route of the router, each role and each namespace: who may, is answered; who may not, gets 403 and 401
    without a key; what is a foreign namespace's is answered exactly as what does not exist, and is as it was afterwards."""
    stranger = (await make_key(database, Role.ADMIN, ["beta"]))[1]
    confined = {role: (await make_key(database, role, ["acme"]))[1] for role in Role}
    everywhere = {role: (await make_key(database, role))[1] for role in Role}

    async def known() -> bool:
        answers = [
            await call(caller, token, "GET /tasks", "/tasks", None)
            for token in (stranger, *confined.values(), *everywhere.values())
        ]
        return all(one.status in (200, 403) for one in answers)

    await wait_until(known)
    connection = await asyncpg.connect(database)
    # Long ids, so that they are found in answers, and nothing else is taken for them.
    await connection.execute("SELECT setval('penstock.task_id_seq', 7300000)")
    await connection.close()
    own = await things(caller, database, confined[Role.ADMIN], OWN)
    foreign = await things(caller, database, stranger, FOREIGN)
    # The same form as the others, and nobody's.
    absent = Things("acme--nothing", NOBODYS_ID, "5f0c2d", "cb-none")
    nowhere = Things("gamma--nothing", NOBODYS_ID, "5f0c2d", "cb-none")
    names = sorted({f"{'GET' if r.method == 'HEAD' else r.method} {r.resource.canonical}" for r in routes})
    assert len(names) > 30
    before = await state_of(database, FOREIGN)

    # What cancels comes last: all others are asked about tasks that live.
    asked = [(name, True) for name in REHEARSED] + [(name, False) for name in names]
    for route, dry in sorted(asked, key=lambda one: ("cancel" in one[0], one[0], not one[1])):
        rule = RULES[route]
        path, body = request_of(route, own, dry=dry)
        if rule.action is None:
            assert (await call(caller, None, route, path, body)).status == 200, route
            continue
        for token in (None, "pk_0123456789abcdef_wrong", "nonsense"):
            refused = await call(caller, token, route, path, body)
            assert (refused.status, refused.headers["WWW-Authenticate"]) == (
                401,
                'Bearer realm="penstock"',
            ), route
        for role in Role:
            may = rule.action in ALLOWED[role]
            everyone = await call(caller, everywhere[role], route, path, body)
            assert (everyone.status == 403) != may, (route, role, everyone.body)
            mine = await call(caller, confined[role], route, path, body)
            assert (mine.status == 403) != may, (route, role, mine.body)
            if may:
                assert mine.status in (200, 201, 409), (route, role, mine.body)
                # A target is absent with its namespace: in one's own any address may be spoken of.
                missing = nowhere if "/targets" in route else absent
                await require_foreign_is_absent(caller, confined[role], route, foreign, missing, dry=dry)
    assert await state_of(database, FOREIGN) == before
    # What was asked of its own was done, and not only rehearsed.
    connection = await asyncpg.connect(database)
    verbs = await connection.fetch("SELECT DISTINCT verb FROM penstock.audit WHERE changed > 0")
    replayed = await connection.fetchval("SELECT state FROM penstock.callback WHERE id = $1", own.callback)
    await connection.close()
    assert "pause" in {row["verb"] for row in verbs}
    # Dead no more; and held where its target was disabled before.
    assert replayed in ("pending", "held")


async def require_foreign_is_absent(
    caller: Caller, token: str, route: str, foreign: Things, absent: Things, *, dry: bool
) -> None:
    path, body = request_of(route, foreign, dry=dry)
    theirs = await call(caller, token, route, path, body)
    for name in (FOREIGN, str(foreign.task), foreign.operation, foreign.callback):
        said = repr(body) + path
        assert name in said or name not in repr(theirs.body), (route, theirs.body)
    if route == "POST /types":
        # Whether it is there or not: by its name alone.
        assert theirs.status == 403
        assert "acme" in theirs.body["detail"]
        return
    path, body = request_of(route, absent, dry=dry)
    nothing = await call(caller, token, route, path, body)
    assert theirs.status == nothing.status, (route, theirs.body, nothing.body)
    assert without(theirs.body, foreign) == without(nothing.body, absent), route


async def state_of(database: str, type_name: str) -> list[Any]:
    connection = await asyncpg.connect(database)
    try:
        tasks = await connection.fetch("SELECT * FROM penstock.task WHERE type = $1 ORDER BY id", type_name)
        types = await connection.fetch("SELECT * FROM penstock.task_type WHERE name = $1", type_name)
        keys = await connection.fetch("SELECT * FROM penstock.type_key WHERE type = $1", type_name)
        audit = await connection.fetch(
            "SELECT id, state, stopped_by FROM penstock.audit WHERE filter->>'type' = $1", type_name
        )
        callbacks = await connection.fetch(
            "SELECT c.* FROM penstock.callback c JOIN penstock.task t ON t.id = c.task_id WHERE t.type = $1",
            type_name,
        )
        targets = await connection.fetch(
            "SELECT * FROM penstock.callback_target WHERE namespace = $1", type_name.partition("--")[0]
        )
        return [[tuple(row) for row in rows] for rows in (tasks, types, keys, audit, callbacks, targets)]
    finally:
        await connection.close()


async def test_keys_over_their_lives(caller, database):
    """O5: a key is taken as soon as it is there; replaced, both hold until the overlap is over; one that has expired or was
    revoked is refused at once, without a query for each request; when it was used is noted."""

    async def status(token: str) -> int:
        return int((await caller.get("/tasks", headers=sent(token))).status)

    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        first_id, first = await make_key(database, Role.READER)
        await wait_until(lambda: is_(status(first), 200))
        second_id, second = secrets.token_hex(8), secrets.token_urlsafe(32)
        new, old = await api_keys.rotate(
            connection,
            first_id,
            new_id=second_id,
            digest=digest_of(second),
            overlap_s=3600,
            expires_at=None,
        )
        assert (new["role"], old["replaced_by"]) == ("reader", second_id)
        await wait_until(lambda: is_(status(token_of(second_id, second)), 200))
        assert await status(first) == 200
        with pytest.raises(Conflict, match="replaced"):
            await api_keys.rotate(
                connection, first_id, new_id="0" * 16, digest=digest_of("x"), overlap_s=0, expires_at=None
            )
        assert await api_keys.revoke(connection, first_id)
        assert not await api_keys.revoke(connection, first_id)
        await wait_until(lambda: is_(status(first), 401))
        assert await status(token_of(second_id, second)) == 200
        with pytest.raises(NotFound):
            await api_keys.revoke(connection, "0" * 16)
        _, brief = await make_key(
            database, Role.READER, expires_at=datetime.now(UTC) + timedelta(seconds=1.5)
        )
        await wait_until(lambda: is_(status(brief), 200))
        # Nothing in the database changes now: the gateway's copy knows when.
        await wait_until(lambda: is_(status(brief), 401))
        used = "SELECT last_used_at FROM api_key WHERE id = $1"
        await wait_until(lambda: not_none(connection.fetchval(used, first_id)))
        kept = await connection.fetchrow("SELECT * FROM api_key WHERE id = $1", second_id)
        assert second not in repr(tuple(kept))
    finally:
        await connection.close()


async def is_(work: Any, expected: Any) -> bool:
    return bool(await work == expected)


async def not_none(work: Any) -> bool:
    return await work is not None


async def test_no_key_holds_when_nobody_can_tell_which(
    kafka_servers, prefix, database, tmp_path, monkeypatch
):
    """O5: fails closed: cut off from the database for a while, a gateway that cannot hear of revocations accepts no key
    (503), and does again by itself; probes are answered, without the names of servers."""
    monkeypatch.setattr(api_keys, "TRUST_S", 1.0)
    monkeypatch.setattr(api_keys, "REFRESH_S", 0.2)
    _, token = await make_key(database, Role.WORKER)
    proxy = Proxy()
    url = await proxy.start(database)
    async with running_gateway(
        kafka=kafka_servers, prefix=prefix, postgres=url, objects=f"file://{tmp_path}", gateway_auth="keys"
    ) as caller:

        async def status() -> int:
            return int(
                (await caller.post("/set_task", {"worker": "w", "results": []}, headers=sent(token))).status
            )

        await wait_until(caller.is_ready)
        assert await status() == 200
        await proxy.cut()
        await wait_until(lambda: is_(status(), 503))

        async def ready() -> int:
            return int((await caller.get("/readyz")).status)

        await wait_until(lambda: is_(ready(), 503))
        probe = await caller.get("/readyz")
        assert "away" in probe.body["checks"]["postgres"]
        assert str(urlsplit(url).port) not in repr(probe.body)
        assert (await caller.get("/healthz")).status == 200
        await proxy.start(database, port=urlsplit(url).port)
        await wait_until(lambda: is_(status(), 200))
    await proxy.cut()


async def test_a_key_has_an_allowance_and_all_it_changes_is_written_down(caller, database):
    """O5: beyond its rate a key is answered 429 with Retry-After while others are not; every request that may change
    something is in the audit with who asked, the route and the answer, refusals for the role too; questions are not."""
    key_id, token = await make_key(database, Role.READER, rate=1.0)
    _, other = await make_key(database, Role.ADMIN)

    async def status(token: str) -> int:
        return int((await caller.get("/types", headers=sent(token))).status)

    await wait_until(lambda: is_(status(other), 200))
    # A copy with the one has the other: it was made before.
    answers = [await caller.get("/types", headers=sent(token)) for _ in range(6)]
    assert {one.status for one in answers} == {200, 429}
    assert all(int(one.headers["Retry-After"]) >= 1 for one in answers if one.status == 429)
    assert await status(other) == 200
    await wait_until(lambda: is_(status(token), 200))

    assert (await caller.post("/types", {"name": "acme--a"}, headers=sent(other))).status == 201
    await wait_until(lambda: is_(denied(caller, token), 403))
    assert (await caller.post("/tasks", {"type": "gone"}, headers=sent(other))).status == 422
    assert (await caller.post("/tasks", {"type": "gone"}, headers=sent("pk_x"))).status == 401

    async def rows() -> list[tuple[str, int]]:
        connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
        try:
            found = await audit.find(connection)
        finally:
            await connection.close()
        assert {row["actor"] for row in found if row["status"] in (403, 429)} <= {f"key:{key_id}"}
        return [(row["route"], row["status"]) for row in reversed(found) if row["status"] != 429]

    expected = [("POST /types", 201), ("POST /types", 403), ("POST /tasks", 422)]
    await wait_until(lambda: is_(rows(), expected))


async def test_strangers_cannot_keep_postgres_busy_by_asking(caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: /readyz needs no key, so however often it is asked, what is behind the gateway is asked once a second."""
    looks = []

    async def look(probes: Any) -> Any:
        looks.append(probes)
        return await readiness(probes)

    monkeypatch.setattr(pages, "readiness", look)
    monkeypatch.setattr(pages, "KEPT_S", 3600.0)
    answers = await asyncio.gather(*(caller.get("/readyz") for _ in range(50)))
    assert {one.status for one in answers} <= {200, 503}
    assert len(looks) <= 1


async def test_refusals_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: while the audit cannot be written no more waits than its bound, however often a client tries again; what was done still
    waits, and what was left out is counted."""
    monkeypatch.setattr(gateway_audit, "MOST_WAITING", 3)
    kept = gateway_audit.Audit(cast("Any", None), 1)
    route = next(name for name, rule in RULES.items() if rule.action is Action.SUBMIT)
    monkeypatch.setattr(gateway_audit, "route_of", lambda _request: route)

    class Asked(dict[Any, Any]):
        path, remote = "/tasks", None

    asked = Asked({GRANT: Grant("key:a", frozenset(), None)})
    for status in (201, 429, 503, 503, 429, 201):
        kept._put(cast("Any", asked), status)
    assert [entry.status for entry in kept._waiting] == [201, 429, 503, 201]
    assert kept._left_out == 2
    with pytest.raises(PostgresUnavailable):
        kept.require_room()


async def denied(caller: Caller, token: str) -> int:
    return int((await caller.post("/types", {"name": "b"}, headers=sent(token))).status)


async def test_operating_a_type_is_less_than_configuring_it(caller, database):
    """O5: an operator pauses and limits a type; what else there is of it takes an admin, and a submitter neither."""
    tokens = {role: (await make_key(database, role, ["acme"]))[1] for role in Role}
    await wait_until(lambda: is_(denied(caller, tokens[Role.READER]), 403))
    assert (await caller.post("/types", {"name": OWN}, headers=sent(tokens[Role.ADMIN]))).status == 201

    async def change(role: Role, body: Any) -> int:
        return int(
            (await caller._call("PATCH", f"/types/{OWN}", headers=sent(tokens[role]), json=body)).status
        )

    hook = {"callbacks": ["https://elsewhere.example/"], "paused": True}
    assert await change(Role.OPERATOR, {"paused": True, "max_in_flight": 3}) == 200
    assert await change(Role.OPERATOR, hook) == 403
    assert await change(Role.SUBMITTER, {"paused": True}) == 403
    assert await change(Role.ADMIN, hook) == 200


async def test_an_operations_id_belongs_to_who_chose_it(caller, database):
    """O5: an id that another namespace has chosen is answered as one that nobody has: the operation is begun once, shown, listed
    and stopped under it, and neither meets the other. Who sees both, sees which is whose."""
    _, ours = await make_key(database, Role.ADMIN, ["acme"])
    _, theirs = await make_key(database, Role.ADMIN, ["beta"])
    _, both = await make_key(database, Role.ADMIN, ["acme", "beta"])
    _, everybody = await make_key(database, Role.ADMIN)
    for token in (ours, theirs, both, everybody):
        await wait_until(lambda token=token: is_(denied(caller, token), 201 if token == everybody else 403))

    async def begin(token: str, name: str, type_name: str) -> Any:
        asked = {"id": name, "verb": "pause", "by": "cron", "filter": {"type": type_name}}
        return await caller.post("/operations", asked, headers=sent(token))

    async def listed(token: str) -> list[str]:
        answer = await caller.get("/operations", headers=sent(token))
        return sorted(one["id"] for one in answer.body["operations"])

    first = await begin(theirs, "nightly", FOREIGN)
    assert first.status == 201
    foreign = await begin(ours, "nightly", OWN)
    absent = await begin(ours, "weekly", OWN)
    assert foreign.status == absent.status == 201
    assert foreign.headers["Location"] == "/operations/nightly"
    assert [*foreign.body] == [*absent.body]
    assert (foreign.body["id"], foreign.body["filter"]) == ("nightly", {"type": OWN})
    # Asked again it is no second one, and under it nothing else can be asked.
    assert (await begin(ours, "nightly", OWN)).status == 200
    assert (await begin(ours, "nightly", "acme--other")).status == 409
    for token, type_name in ((ours, OWN), (theirs, FOREIGN)):
        found = await caller.get("/operations/nightly", headers=sent(token))
        assert found.body["filter"] == {"type": type_name}
    assert await listed(ours) == ["nightly", "weekly"]
    assert await listed(theirs) == ["nightly"]
    stopped = await caller.post("/operations/nightly/stop", {"by": "x"}, headers=sent(ours))
    assert (stopped.status, stopped.body["id"]) == (200, "nightly")
    for token in (both, everybody):
        assert await listed(token) == ["nightly", "nightly@acme", "weekly"]
        found = await caller.get("/operations/nightly@acme", headers=sent(token))
        assert found.body["filter"] == {"type": OWN}
    assert (await caller.get("/operations/nightly@acme", headers=sent(theirs))).status == 404


async def test_operations_by_filter_are_confined(caller, database):
    """O5, F5: who is confined to a namespace changes by filter only tasks of it: a foreign type is as one that is not there,
    foreign ids as ids of nobody, and a filter with neither is refused; who asked is in the audit."""
    ours_id, ours = await make_key(database, Role.ADMIN, ["acme", "other"])
    _, theirs = await make_key(database, Role.ADMIN, ["beta"])
    await wait_until(lambda: is_(denied(caller, theirs), 403))
    own = await things(caller, database, ours, OWN)
    foreign = await things(caller, database, theirs, FOREIGN)

    async def cancel(what: dict[str, Any]) -> Any:
        asked = {"verb": "cancel", "by": "somebody else", "filter": what}
        return await caller.post("/operations", asked, headers=sent(ours))

    refused = await cancel({"states": ["ready"]})
    assert (refused.status, refused.pointers) == (422, ["/filter"])
    for what in (
        {"type": FOREIGN},
        {"ids": [foreign.task]},
        {"type": FOREIGN, "ids": [foreign.task, own.task]},
    ):
        begun = await cancel(what)
        assert (begun.status, begun.body["state"], begun.body["changed"]) == (201, "done", 0), begun.body
        assert begun.body["actor"] == f"key:{ours_id}"
    begun = await cancel({"ids": [foreign.task, own.task]})
    assert begun.body["changed"] == 1
    assert (await caller.get(f"/tasks/{foreign.task}", headers=sent(theirs))).body["state"] == "ready"
    assert (await caller.get(f"/tasks/{own.task}", headers=sent(ours))).body["state"] == "cancelled"


async def test_results_of_foreign_tasks_have_no_effect(caller, database, kafka_servers, prefix):
    """O5, W4: a worker of one namespace can neither beat nor end what a worker of another has in hand."""
    _, ours = await make_key(database, Role.WORKER, ["acme"])
    _, theirs = await make_key(database, Role.ADMIN, ["beta"])
    await wait_until(lambda: is_(denied(caller, theirs), 403))
    foreign = await things(caller, database, theirs, FOREIGN)
    kafka = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(kafka, [STAGE_RESULTS, HEARTBEATS])
    entry = {"id": foreign.task, "step": 0, "stage": "start", "attempt": 0}
    results = [{**entry, "outcome": "done"}, {**entry, "outcome": "progress"}]
    told = await caller.post("/set_task", {"worker": "w", "results": results}, headers=sent(ours))
    assert told.body == {"accepted": 1, "rejected": [], "gone": [{"index": 1, "why": "over"}]}
    # Behind it, by the same worker's name and so in the same partition: what may be reported.
    failed = {**entry, "outcome": "fail", "error": {"kind": "Mine", "message": ""}}
    _, worker = await make_key(database, Role.WORKER, ["beta"])
    await wait_until(lambda: is_(reported(caller, worker, failed), 200))
    async with running(make_consumer(kafka, None, prefix + STAGE_RESULTS.name)) as consumer:
        record = await consumer.getone()
    assert b"Mine" in record.value


async def reported(caller: Caller, token: str, entry: Any) -> int:
    body = {"worker": "w", "results": [entry]}
    return int((await caller.post("/set_task", body, headers=sent(token))).status)


async def test_no_answer_serves_a_page_of_another_site(caller, database):
    """O5: every answer, right, wrong or refused, forbids browsers to sniff, frame, keep or share it, and none names an origin that
    may read it, also not to a preflight."""
    _, token = await make_key(database, Role.READER)
    page = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method, path in (
        ("GET", "/"),
        ("GET", "/types"),
        ("GET", "/nowhere"),
        ("OPTIONS", "/tasks"),
        ("POST", "/tasks"),
        ("GET", "/readyz"),
    ):
        for headers in (page, {**page, **sent(token)}):
            async with caller.session.request(method, caller.url + path, headers=headers) as answer:
                told = answer.headers
            assert not [name for name in told if name.startswith("Access-Control")], path
            assert told["X-Content-Type-Options"] == "nosniff"
            assert told["X-Frame-Options"] == "DENY"
            assert told["Cache-Control"] == "no-store"
            assert "frame-ancestors 'none'" in told["Content-Security-Policy"]
            assert told["Server"] == "penstock"


SECRET = "Authorization: Bearer pk_0123456789abcdef_"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        pytest.param(f"GET /types HTTP/1.1\r\n{SECRET}{'x' * 9_000}\r\n", 431, id="a long header"),
        pytest.param(f"GET /types?x={'x' * 9_000} HTTP/1.1\r\n{SECRET}\r\n", 431, id="a long address"),
        pytest.param(
            "GET /types HTTP/1.1\r\n" + "".join(f"X-{n}: {SECRET}\r\n" for n in range(200)),
            431,
            id="many headers",
        ),
        pytest.param(f"GET /types HTTP/1.1\r\nno header {SECRET[:9]}\x00\r\n", 400, id="no HTTP"),
    ],
)
async def test_what_is_no_request_is_answered_with_a_problem(caller, caplog, head, status):
    """O5: what the parser refuses is a problem document like every other refusal, with the same headers; neither the answer nor
    the log repeats any of it, and nobody can fill the log with tracebacks. What is just short enough is a request."""
    where = urlsplit(caller.url)
    with caplog.at_level("INFO"):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(head.encode() + b"Host: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    told, _, body = answer.partition(b"\r\n\r\n")
    lines = told.decode().split("\r\n")
    assert int(lines[0].split()[1]) == status
    document = json.loads(body)
    assert (document["type"], document["status"]) == ("about:blank", status)
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    assert headers["content-type"].startswith("application/problem+json")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["server"] == "penstock"
    assert "pk_" not in answer.decode()
    assert "pk_" not in caplog.text
    assert "Traceback" not in caplog.text
    assert "refused a request of 127.0.0.1" in caplog.text
    assert (await caller.get("/types", headers={"X-Long": "x" * 8_000})).status == 401


async def test_targets_are_confined(caller, database):
    """C8, O5: of one address in two namespaces each sees, changes and replays its own, and without naming it; a key of all, or of
    several, names the one it means, else `default`; a misspelt namespace is told, and is not made."""
    ours = (await make_key(database, Role.ADMIN, ["acme"]))[1]
    both = (await make_key(database, Role.ADMIN, ["acme", "beta"]))[1]
    theirs = (await make_key(database, Role.ADMIN, ["beta"]))[1]
    everybody = (await make_key(database, Role.ADMIN))[1]
    await wait_until(lambda: is_(denied(caller, theirs), 403))
    own = await things(caller, database, ours, OWN)
    foreign = await things(caller, database, theirs, FOREIGN)

    async def listed(token: str, path: str = "/targets", **query: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        cursor: str | None = None
        while cursor is not None or not found:
            more = {} if cursor is None else {"cursor": cursor}
            answer = await caller.get(path, params={**query, **more, "limit": "1"}, headers=sent(token))
            assert answer.status == 200, answer.body
            found += [(one["namespace"], one["state"]) for one in answer.body[path[1:]]]
            cursor = answer.body["next"]
            if cursor is None:
                break
        return found

    async def said(token: str, verb: str, **body: Any) -> Any:
        return await caller.post(f"/targets/{verb}", {"url": own.url, **body}, headers=sent(token))

    acme, beta = ("acme", "disabled"), ("beta", "disabled")
    for state in ({}, {"state": "disabled"}, {"url": own.url}, {"prefix": "https://hook"}):
        assert await listed(ours, **state) == [acme]
        assert await listed(theirs, **state) == [beta]
        assert await listed(both, **state) == await listed(everybody, **state) == [acme, beta]
        assert await listed(both, namespace="beta", **state) == [beta]
        assert await listed(everybody, namespace="beta", **state) == [beta]
        assert await listed(ours, namespace="beta", **state) == []
    assert await listed(ours, state="normal") == await listed(everybody, state="normal") == []
    dead = ("acme", "dead"), ("beta", "dead")
    for what in ({}, {"target": own.url}):
        assert await listed(ours, "/callbacks", **what) == [dead[0]]
        assert (
            await listed(everybody, "/callbacks", **what)
            == await listed(both, "/callbacks", **what)
            == [*dead]
        )
        assert await listed(both, "/callbacks", namespace="beta", **what) == [dead[1]]

    assert (await said(ours, "enable")).body["target"]["namespace"] == "acme"
    assert await listed(everybody) == [("acme", "normal"), beta]
    # Which of two is meant is not guessed; and `default` is none of theirs.
    for verb, more in (("enable", {}), ("disable", {"why": "which?"}), ("limit", {"rate": 1})):
        for token in (both, everybody):
            asked = await said(token, verb, **more)
            assert asked.status == 422, asked.body
            assert "acme, beta: say in which one" in str(asked.body)
        told = await caller.post(
            f"/targets/{verb}", {"url": "https://nobody.example/", **more}, headers=sent(both)
        )
        assert (told.status, "say in which one" in str(told.body)) == (404, True), told.body
    assert (await said(everybody, "disable", namespace="gamma", why="misspelt")).status == 404
    assert (await said(everybody, "limit", namespace="beta", rate=3)).body["target"]["rate"] == 3
    shared = await said(everybody, "disable", namespace="default", why="all of ours")
    assert shared.body["target"]["namespace"] == "default"
    # As soon as `default` has it, too, it is what is meant.
    assert (await said(everybody, "limit", rate=None)).body["target"]["namespace"] == "default"
    assert await listed(everybody) == [("acme", "normal"), beta, ("default", "disabled")]
    assert (await said(ours, "disable", namespace="acme", why="again")).body["changed"] is True

    async def replayed(token: str, **body: Any) -> tuple[int, int]:
        told = await caller.post("/callbacks/replay", {"target": own.url, **body}, headers=sent(token))
        assert told.status == 200, told.body
        return told.body["replayed"], told.body["held"]

    assert (
        await replayed(both) == await replayed(everybody) == await replayed(ours, namespace="beta") == (0, 0)
    )
    assert await replayed(ours, dry_run=True) == (1, 1)
    assert await replayed(theirs) == (1, 1)
    assert await listed(everybody, "/callbacks", state="held") == [("beta", "held")]
    assert (await said(ours, "enable")).status == 200
    assert await replayed(both, namespace="acme") == (1, 0)
    assert await listed(ours, "/callbacks", state="pending") == [("acme", "pending")]
    assert await listed(ours, "/callbacks", id=foreign.callback) == []
