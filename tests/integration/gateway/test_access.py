"""Access control: each role and namespace on each route of the router, and the life of API keys."""

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
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller, Proxy, running_gateway
from tests.support.http_requests import raw_request
from tests.support.waiting import in_time, wait_until

from penstock.core.access import ALLOWED, Action, Grant, Role, digest_of, token_of
from penstock.crypto import PrivateKey, generate_private_key
from penstock.errors import Conflict, NotFound, PostgresUnavailable
from penstock.gateway import app as gateway_app
from penstock.gateway import audit as gateway_audit
from penstock.gateway import pages
from penstock.gateway.access import GRANT
from penstock.gateway.rules import RULES
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS, HEARTBEATS, REVOKED, STAGE_RESULTS, TASK_LOGS, WORKERS
from penstock.metrics.server import readiness
from penstock.postgres import api_keys, audit
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka

FOREIGN, OWN = "beta--render", "acme--render"
UNKNOWN_ID = 9_400_000
UNKNOWN_SECRET = "e1" * 8
PUBLIC_KEY = PrivateKey(generate_private_key()).public
LEASE = {"worker": "w", "stage": "start", "step": 0, "attempt": 0}


class Resources(NamedTuple):
    """The resources of one namespace."""

    type: str
    task: int
    operation: str
    callback: str
    flow: int
    backfill: int
    secret: str
    api_key: str
    url: str = "https://hook.example/"

    @property
    def namespace(self) -> str:
        """The namespace of the type."""
        return self.type.partition("--")[0]


@pytest.fixture
async def routes(monkeypatch):
    """The routes of the router, recorded while the gateway checks that each has a rule."""
    found: list[Any] = []
    check = gateway_app.require_rules

    def record(routes):
        found.extend(routes)
        check(found)

    monkeypatch.setattr(gateway_app, "require_rules", record)
    return found


@pytest.fixture
async def caller(routes, kafka_servers, prefix, database, tmp_path):
    # The gateway publishes to these topics; a missing topic delays its stop.
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [EVENTS, REVOKED, TASK_LOGS, WORKERS])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        yield caller


async def call(caller: Caller, token: str | None, route: str, path: str, body: Any) -> Any:
    method = route.partition(" ")[0]
    more: dict[str, Any] = {} if body is None else {"json": body}
    headers = sent(token) if token else {}
    return await caller._call(method, path, headers=headers, **more)


async def create_resources(caller: Caller, database: str, token: str, type_name: str) -> Resources:
    """Creates a type with a task, an operation, and a dead callback to a target that both
    namespaces call."""
    headers = sent(token)
    assert (await caller.post("/types", {"name": type_name}, headers=headers)).status == 201
    task = (await caller.post("/tasks", {"type": type_name, "context": 1}, headers=headers)).body["id"]
    assert (await caller.post("/flow-definitions", definition_of(type_name), headers=headers)).status == 201
    body = {"verb": "reprioritise", "priority": "HIGH", "by": "test", "filter": {"type": type_name}}
    operation = (await caller.post("/operations", body, headers=headers)).body["id"]
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
        flow = await connection.fetchval(
            "INSERT INTO penstock.flow (name, version, unfinished) VALUES ($1, 1, 1) RETURNING id", type_name
        )
        # Paused, and with a name of its own in an answer.
        schedule = {"flow": type_name, "cron": "0 2 * * *", "paused": True}
        assert (
            await caller._call("PUT", f"/schedules/{type_name}", headers=headers, json=schedule)
        ).status == 201
        backfill = await connection.fetchval(
            "INSERT INTO penstock.backfill (id, schedule, since, until, rerun, position, total, asked_by) "
            "OVERRIDING SYSTEM VALUE VALUES ($2, $1, now(), now(), false, now(), 0, 'test') RETURNING id",
            type_name,
            task + 1_000_000,
        )
        # An ed25519 key, because its public key is in answers.
        secret = secrets.token_hex(8)
        await connection.execute(
            "INSERT INTO penstock.callback_secret (id, namespace, url, scheme, reference, public_key) "
            "VALUES ($1, $2, 'https://hook.example/', 'v1a', 'env:A', $3)",
            secret,
            type_name.partition("--")[0],
            PUBLIC_KEY,
        )
    finally:
        await connection.close()
    api_key, _ = await make_key(database, Role.READER, [type_name.partition("--")[0]])
    return Resources(type_name, task, operation, f"cb-{task}", flow, backfill, secret, api_key)


CHUNK = {"step": 0, "attempt": 0, "run": "a1", "first": 0, "lines": [[1785312000123, 20, "log", "text"]]}


def definition_of(name: str) -> dict[str, Any]:
    """A flow definition with the name of the type of its only task."""
    return {"flow": name, "version": 1, "nodes": {"work": {"kind": "task", "type": name}}}


# Routes with a dry run.
DRY_RUN_ROUTES = (
    "POST /callbacks/replay",
    "POST /operations",
    "POST /flows/operations",
    "POST /schedules/{name}/backfill",
)


# Routes about all namespaces at once, which no confined key may call.
UNCONFINED_ROUTES = ("POST /targets/secrets/reencrypt", "GET /audit")

# Answers of open routes: sign-in needs an origin and a provider, and a gateway without a built
# console has no file.
OPEN_ANSWERS = {
    "POST /session": {403},
    "GET /session/oidc": {403},
    "GET /session/oidc/callback": {403},
    "GET /console": {200, 404},
    "GET /console/{path}": {200, 404},
}


def request_of(route: str, resources: Resources, *, dry: bool) -> tuple[str, Any]:
    """A valid request to a route about these resources. A new route needs an entry here."""
    name, task, flow = resources.type, resources.task, resources.flow
    backfill = resources.backfill
    entry = {**LEASE, "id": task, "outcome": "progress"}
    del entry["worker"]
    target = {"url": resources.url, "namespace": resources.namespace}
    requests: dict[str, tuple[str, Any]] = {
        "POST /tasks": ("/tasks", {"type": name, "context": None}),
        "GET /tasks": (f"/tasks?type={name}", None),
        "POST /tasks/states": ("/tasks/states", {"ids": [task]}),
        "POST /tasks/ended": ("/tasks/ended", {"ids": [task]}),
        "POST /tasks/progress": ("/tasks/progress", {"ids": [task]}),
        "POST /tasks/cancel": ("/tasks/cancel", {"ids": [task]}),
        "GET /tasks/{id}": (f"/tasks/{task}", None),
        "GET /tasks/{id}/why": (f"/tasks/{task}/why", None),
        "GET /tasks/{id}/logs": (f"/tasks/{task}/logs", None),
        "GET /tasks/{id}/logs/{step}/{attempt}": (f"/tasks/{task}/logs/0/0?format=text", None),
        "DELETE /tasks/{id}/logs": (f"/tasks/{task}/logs", None),
        "POST /logs": ("/logs", {"worker": "w", "chunks": [{**CHUNK, "id": task}]}),
        "POST /tasks/{id}/cancel": (f"/tasks/{task}/cancel", None),
        "POST /tasks/{id}/rerun": (f"/tasks/{task}/rerun", {"idempotency_key": "again"}),
        "GET /backlog": (f"/backlog?type={name}", None),
        "GET /owners": ("/owners", None),
        "GET /workers": (f"/workers?type={name}", None),
        "GET /types": ("/types", None),
        "GET /types/{name}": (f"/types/{name}", None),
        "GET /types/{name}/durations": (f"/types/{name}/durations", None),
        "POST /types": ("/types", {"name": name}),
        "PATCH /types/{name}": (f"/types/{name}", {"paused": False}),
        "POST /flow-definitions": ("/flow-definitions", definition_of(name)),
        "GET /flow-definitions": ("/flow-definitions", None),
        "GET /flow-definitions/{name}": (f"/flow-definitions/{name}", None),
        "GET /flow-definitions/{name}/versions/{version}": (f"/flow-definitions/{name}/versions/1", None),
        "POST /flows": ("/flows", {"flow": name, "idempotency_key": "k"}),
        "POST /events/{name}": (f"/events/{name}", {"id": "e"}),
        "GET /types/{name}/keys": (f"/types/{name}/keys", None),
        "POST /types/{name}/keys": (f"/types/{name}/keys", {"key": "k", "weight": 2}),
        "POST /types/{name}/keys/reset": (f"/types/{name}/keys/reset", {"key": "k"}),
        "GET /targets": (f"/targets?url={resources.url}&namespace={resources.namespace}", None),
        "POST /targets/disable": ("/targets/disable", {**target, "why": "test"}),
        "POST /targets/enable": ("/targets/enable", target),
        "POST /targets/limit": ("/targets/limit", {**target, "rate": 1.0}),
        "GET /targets/secrets": (f"/targets/secrets?namespace={resources.namespace}", None),
        "POST /targets/secrets": ("/targets/secrets", target),
        "POST /targets/secrets/reencrypt": ("/targets/secrets/reencrypt", None),
        "POST /targets/secrets/{id}/rotate": (
            f"/targets/secrets/{resources.secret}/rotate",
            {"secret": generate_private_key()},
        ),
        "DELETE /targets/secrets/{id}": (f"/targets/secrets/{resources.secret}", None),
        "GET /targets/public-keys": (f"/targets/public-keys?namespace={resources.namespace}", None),
        "GET /callbacks": (f"/callbacks?id={resources.callback}", None),
        "POST /callbacks/replay": ("/callbacks/replay", {"ids": [resources.callback], "dry_run": dry}),
        "POST /operations": (
            "/operations",
            {"verb": "pause", "by": "test", "filter": {"ids": [task]}, "dry_run": dry},
        ),
        "GET /operations": ("/operations", None),
        "GET /operations/{id}": (f"/operations/{resources.operation}", None),
        "POST /operations/{id}/stop": (f"/operations/{resources.operation}/stop", {"by": "test"}),
        "POST /flows/operations": (
            "/flows/operations",
            {"verb": "pause", "by": "test", "filter": {"ids": [flow]}, "dry_run": dry},
        ),
        "GET /flows": (f"/flows?name={name}", None),
        "GET /flows/{id}": (f"/flows/{flow}", None),
        "GET /flows/{id}/nodes/{node}": (f"/flows/{flow}/nodes/work", None),
        "GET /flows/{id}/why": (f"/flows/{flow}/why", None),
        "POST /flows/{id}/pause": (f"/flows/{flow}/pause", None),
        "POST /flows/{id}/resume": (f"/flows/{flow}/resume", None),
        "POST /flows/{id}/cancel": (f"/flows/{flow}/cancel", None),
        "POST /flows/{id}/recover": (f"/flows/{flow}/recover", None),
        "POST /flows/{id}/rerun": (f"/flows/{flow}/rerun", {"idempotency_key": "again"}),
        "PUT /schedules/{name}": (f"/schedules/{name}", {"flow": name, "cron": "0 2 * * *", "paused": True}),
        "GET /schedules": (f"/schedules?flow={name}", None),
        "GET /schedules/{name}": (f"/schedules/{name}", None),
        "DELETE /schedules/{name}": (f"/schedules/{name}", None),
        "POST /schedules/{name}/pause": (f"/schedules/{name}/pause", None),
        "POST /schedules/{name}/resume": (f"/schedules/{name}/resume", None),
        "GET /schedules/{name}/ticks": (f"/schedules/{name}/ticks", None),
        "GET /schedules/{name}/skips": (f"/schedules/{name}/skips", None),
        "GET /schedules/{name}/history": (f"/schedules/{name}/history", None),
        "POST /schedules/{name}/backfill": (
            f"/schedules/{name}/backfill",
            {"since": "2026-01-01T00:00:00Z", "until": "2026-01-02T00:00:00Z", "by": "test", "dry_run": dry},
        ),
        "GET /backfills": (f"/backfills?schedule={name}", None),
        "GET /backfills/{id}": (f"/backfills/{backfill}", None),
        "POST /backfills/{id}/stop": (f"/backfills/{backfill}/stop", {"by": "test", "cancel": True}),
        "POST /hold_task": ("/hold_task", {"worker": "w", "type": name, "wait_s": 0}),
        "POST /set_task": ("/set_task", {"worker": "w", "results": [entry]}),
        "GET /overview": ("/overview", None),
        # A topic that does not exist, because the answer to others does not end.
        "GET /live": ("/live?topics=nothing", None),
        "GET /keys": ("/keys", None),
        "POST /keys": ("/keys", {"name": "n", "role": "reader", "namespaces": [resources.namespace]}),
        "POST /keys/{id}/rotate": (f"/keys/{resources.api_key}/rotate", {}),
        "DELETE /keys/{id}": (f"/keys/{resources.api_key}", None),
        "GET /audit": ("/audit", None),
        "GET /session": ("/session", None),
        "POST /session": ("/session", {"api_key": "pk_none"}),
        "DELETE /session": ("/session", None),
        "GET /session/oidc": ("/session/oidc", None),
        "GET /session/oidc/callback": ("/session/oidc/callback", None),
        "GET /console": ("/console", None),
        "GET /console/{path}": ("/console/tasks", None),
        "GET /": ("/", None),
        "GET /docs": ("/docs", None),
        "GET /openapi.json": ("/openapi.json", None),
        "GET /healthz": ("/healthz", None),
        "GET /livez": ("/livez", None),
        "GET /readyz": ("/readyz", None),
    }
    return requests[route]


def mask_names(value: Any, resources: Resources) -> Any:
    """Masks the names of the resources, so that answers about different resources can be
    compared."""
    text = repr(value)
    for name in (
        resources.type,
        str(resources.task),
        resources.operation,
        resources.callback,
        str(resources.flow),
        str(resources.backfill),
        resources.secret,
        resources.api_key,
        f"namespace {resources.namespace}:",
    ):
        text = text.replace(name, "?")
    # Each request makes a new operation id and new times.
    return re.sub(r"\b[0-9a-f]{32}\b|\d{4}-\d\d-\d\dT[\d:.]+Z", "?", text)


async def test_every_route_checks_role_and_namespace(caller, routes, database):
    """O5: each route answers allowed roles, and answers 403 to other roles and 401 without a valid
    key. A foreign resource is answered like an absent one, and stays unchanged."""
    foreign_admin = (await make_key(database, Role.ADMIN, ["beta"]))[1]
    confined = {role: (await make_key(database, role, ["acme"]))[1] for role in Role}
    everywhere = {role: (await make_key(database, role))[1] for role in Role}

    async def keys_are_loaded() -> bool:
        answers = [
            await call(caller, token, "GET /tasks", "/tasks", None)
            for token in (foreign_admin, *confined.values(), *everywhere.values())
        ]
        return all(one.status in (200, 403) for one in answers)

    await wait_until(keys_are_loaded)
    connection = await asyncpg.connect(database)
    # Long ids cannot be confused with other numbers in an answer.
    await connection.execute("SELECT setval('penstock.task_id_seq', 7300000)")
    await connection.close()
    own = await create_resources(caller, database, confined[Role.ADMIN], OWN)
    foreign = await create_resources(caller, database, foreign_admin, FOREIGN)
    # These names have the same form, but do not exist.
    absent = Resources(
        "acme--nothing", UNKNOWN_ID, "5f0c2d", "cb-none", UNKNOWN_ID, UNKNOWN_ID, UNKNOWN_SECRET, "e2" * 8
    )
    absent_namespace = Resources(
        "gamma--nothing", UNKNOWN_ID, "5f0c2d", "cb-none", UNKNOWN_ID, UNKNOWN_ID, UNKNOWN_SECRET, "e2" * 8
    )
    names = sorted({f"{'GET' if r.method == 'HEAD' else r.method} {r.resource.canonical}" for r in routes})
    assert len(names) > 30
    before = await state_of(database, FOREIGN)

    def is_ending(route: str) -> bool:
        return "cancel" in route or "DELETE" in route or route == "POST /tasks/{id}/rerun"

    # Routes that cancel or remove come last, because the other requests need live tasks. A rerun
    # needs an ended one.
    calls = [(name, True) for name in DRY_RUN_ROUTES] + [(name, False) for name in names]
    for route, dry in sorted(calls, key=lambda one: (is_ending(one[0]), one[0], not one[1])):
        action = RULES[route]
        path, body = request_of(route, own, dry=dry)
        if action is None:
            assert (await call(caller, None, route, path, body)).status in OPEN_ANSWERS.get(route, {200}), (
                route
            )
            continue
        for token in (None, "pk_0123456789abcdef_wrong", "nonsense"):
            refused = await call(caller, token, route, path, body)
            assert (refused.status, refused.headers["WWW-Authenticate"]) == (
                401,
                'Bearer realm="penstock"',
            ), route
        for role in Role:
            allowed = action in ALLOWED[role]
            unconfined_answer = await call(caller, everywhere[role], route, path, body)
            assert (unconfined_answer.status == 403) != allowed, (route, role, unconfined_answer.body)
            confined_answer = await call(caller, confined[role], route, path, body)
            allowed = allowed and route not in UNCONFINED_ROUTES
            assert (confined_answer.status == 403) != allowed, (route, role, confined_answer.body)
            if allowed:
                served = (422,) if route == "GET /live" else (200, 201, 202, 409)
                assert confined_answer.status in served, (route, role, confined_answer.body)
                # A key may name any address in its own namespace, so this one is absent, too.
                in_namespace = "/targets" in route or route == "POST /keys"
                missing = absent_namespace if in_namespace else absent
                await assert_foreign_looks_absent(caller, confined[role], route, foreign, missing, dry=dry)
    assert await state_of(database, FOREIGN) == before
    # The requests about the key's own resources took effect, not only their dry runs.
    connection = await asyncpg.connect(database)
    verbs = await connection.fetch("SELECT DISTINCT verb FROM penstock.audit WHERE changed > 0")
    replayed = await connection.fetchval("SELECT state FROM penstock.callback WHERE id = $1", own.callback)
    await connection.close()
    assert "pause" in {row["verb"] for row in verbs}
    await assert_changes_are_audited(database, names)
    # The replayed callback is held if an earlier request disabled its target.
    assert replayed in ("pending", "held")


async def assert_changes_are_audited(database: str, names: list[str]) -> None:
    """Each route that operates or configures keeps what it changed. A new one fails here until its
    handler notes it (`penstock.gateway.changes`)."""
    # The flows of this test have nothing to recover, so the request is refused.
    changing = {
        name
        for name in names
        if RULES[name] in (Action.OPERATE, Action.CONFIGURE) and not name.startswith("GET ")
    } - {"POST /flows/{id}/recover"}

    async def kept() -> set[str]:
        connection = await asyncpg.connect(database)
        try:
            rows = await connection.fetch(
                "SELECT DISTINCT route FROM penstock.audit_request WHERE change IS NOT NULL AND status < 400"
            )
        finally:
            await connection.close()
        return {row["route"] for row in rows}

    async def are_kept() -> bool:
        return await kept() == changing

    try:
        await wait_until(are_kept)
    except TimeoutError as error:
        raise AssertionError(f"these routes keep nothing: {sorted(changing - await kept())}") from error


async def assert_foreign_looks_absent(
    caller: Caller, token: str, route: str, foreign: Resources, absent: Resources, *, dry: bool
) -> None:
    path, body = request_of(route, foreign, dry=dry)
    foreign_answer = await call(caller, token, route, path, body)
    for name in (
        FOREIGN,
        str(foreign.task),
        foreign.operation,
        foreign.callback,
        str(foreign.flow),
        str(foreign.backfill),
        foreign.secret,
        foreign.api_key,
        PUBLIC_KEY,
    ):
        request_text = repr(body) + path
        assert name in request_text or name not in repr(foreign_answer.body), (route, foreign_answer.body)
    if route in ("POST /types", "POST /flow-definitions", "POST /events/{name}", "PUT /schedules/{name}"):
        # The name alone decides, whether there is such a resource or not.
        assert foreign_answer.status == 403
        assert "acme" in foreign_answer.body["detail"]
        return
    path, body = request_of(route, absent, dry=dry)
    absent_answer = await call(caller, token, route, path, body)
    assert foreign_answer.status == absent_answer.status, (route, foreign_answer.body, absent_answer.body)
    assert mask_names(foreign_answer.body, foreign) == mask_names(absent_answer.body, absent), route


async def state_of(database: str, type_name: str) -> list[Any]:
    connection = await asyncpg.connect(database)
    try:
        tasks = await connection.fetch("SELECT * FROM penstock.task WHERE type = $1 ORDER BY id", type_name)
        types = await connection.fetch("SELECT * FROM penstock.task_type WHERE name = $1", type_name)
        concurrency_keys = await connection.fetch(
            "SELECT * FROM penstock.type_key WHERE type = $1", type_name
        )
        flows = await connection.fetch(
            "SELECT f.*, i.id AS command FROM penstock.flow f LEFT JOIN penstock.flow_inbox i ON i.flow_id = f.id "
            "WHERE f.name = $1",
            type_name,
        )
        audit = await connection.fetch(
            "SELECT id, state, stopped_by FROM penstock.audit WHERE filter->>'type' = $1", type_name
        )
        callbacks = await connection.fetch(
            "SELECT c.* FROM penstock.callback c JOIN penstock.task t ON t.id = c.task_id WHERE t.type = $1",
            type_name,
        )
        schedules = await connection.fetch("SELECT * FROM penstock.schedule WHERE name = $1", type_name)
        backfills = await connection.fetch("SELECT * FROM penstock.backfill WHERE schedule = $1", type_name)
        targets = await connection.fetch(
            "SELECT * FROM penstock.callback_target WHERE namespace = $1", type_name.partition("--")[0]
        )
        stored_secrets = await connection.fetch(
            "SELECT * FROM penstock.callback_secret WHERE namespace = $1 ORDER BY id",
            type_name.partition("--")[0],
        )
        return [
            [tuple(row) for row in rows]
            for rows in (
                tasks,
                types,
                concurrency_keys,
                flows,
                audit,
                callbacks,
                targets,
                stored_secrets,
                schedules,
                backfills,
            )
        ]
    finally:
        await connection.close()


async def test_api_keys_are_rotated_revoked_and_expire(caller, database):
    """O5: a new API key works at once, and a rotated one until its overlap ends. An expired or
    revoked key is rejected without a query for each request. The last use is recorded."""

    async def status(token: str) -> int:
        return int((await caller.get("/tasks", headers=sent(token))).status)

    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        first_id, first = await make_key(database, Role.READER)
        await wait_until(lambda: equals(status(first), 200))
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
        await wait_until(lambda: equals(status(token_of(second_id, second)), 200))
        assert await status(first) == 200
        with pytest.raises(Conflict, match="replaced"):
            await api_keys.rotate(
                connection, first_id, new_id="0" * 16, digest=digest_of("x"), overlap_s=0, expires_at=None
            )
        assert await api_keys.revoke(connection, first_id)
        assert not await api_keys.revoke(connection, first_id)
        await wait_until(lambda: equals(status(first), 401))
        assert await status(token_of(second_id, second)) == 200
        with pytest.raises(NotFound):
            await api_keys.revoke(connection, "0" * 16)
        _, expiring = await make_key(
            database, Role.READER, expires_at=datetime.now(UTC) + timedelta(seconds=1.5)
        )
        await wait_until(lambda: equals(status(expiring), 200))
        # The database does not change at the expiry; the gateway's cache checks the time.
        await wait_until(lambda: equals(status(expiring), 401))
        used = "SELECT last_used_at FROM api_key WHERE id = $1"
        await wait_until(lambda: not_none(connection.fetchval(used, first_id)))
        row = await connection.fetchrow("SELECT * FROM api_key WHERE id = $1", second_id)
        assert second not in repr(tuple(row))
    finally:
        await connection.close()


async def test_the_clock_of_a_gateway_decides_about_no_key(database, monkeypatch):
    """O5: a gateway whose clock is two hours ahead accepts a key that expires in an hour. A gateway
    whose clock is two hours behind refuses a key that has expired."""

    def shift(hours: int) -> None:
        class Shifted(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(hours=hours)

        monkeypatch.setattr(api_keys, "datetime", Shifted)

    _, valid = await make_key(database, Role.READER, expires_at=datetime.now(UTC) + timedelta(hours=1))
    _, expiring = await make_key(database, Role.READER, expires_at=datetime.now(UTC) + timedelta(seconds=2))
    async with open_pool(database, "test") as pool:
        cache = api_keys.ApiKeyCache(database, pool)
        await cache.load()
        shift(2)
        assert await cache.authenticate(valid)
        shift(-2)

        async def refused() -> bool:
            return await cache.authenticate(expiring) is None

        await wait_until(refused, what="the key has expired by the database's clock")


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_stop_that_comes_with_a_changed_key_ends_the_gateway(database, steps):
    """`asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the
    awaited event. The refresh of keys went on, and the gateway never stopped."""
    async with open_pool(database, "test") as pool:
        cache = api_keys.ApiKeyCache(database, pool)
        running = asyncio.ensure_future(cache.run())

        async def waiting() -> bool:
            return bool(cache._changed._waiters)

        await wait_until(waiting)
        cache._changed.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=2 * api_keys.REFRESH_S)
        assert running.cancelled()


async def equals(awaitable: Any, expected: Any) -> bool:
    return bool(await awaitable == expected)


async def not_none(awaitable: Any) -> bool:
    return await awaitable is not None


async def test_no_key_is_accepted_without_the_database(
    kafka_servers, prefix, database, tmp_path, monkeypatch
):
    """O5: a gateway without its database cannot see revocations, so it accepts no key and answers
    503. It recovers by itself. Probes are answered without server names."""
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

        await wait_until(lambda: equals(status(), 200))
        await proxy.cut()
        await wait_until(lambda: equals(status(), 503))

        async def ready() -> int:
            return int((await caller.get("/readyz")).status)

        await wait_until(lambda: equals(ready(), 503))
        probe = await caller.get("/readyz")
        assert "unavailable" in probe.body["checks"]["postgres"]
        assert str(urlsplit(url).port) not in repr(probe.body)
        assert (await caller.get("/healthz")).status == 200
        await proxy.start(database, port=urlsplit(url).port)
        await wait_until(lambda: equals(status(), 200))
    await proxy.cut()


async def test_a_key_has_a_rate_limit_and_its_changes_are_audited(caller, database):
    """O5: a key beyond its rate gets 429 with Retry-After, and other keys do not. The audit holds
    each writing request with its key, route and status, but no reading request."""
    key_id, token = await make_key(database, Role.READER, rate=1.0)
    _, admin_token = await make_key(database, Role.ADMIN)

    async def status(token: str) -> int:
        return int((await caller.get("/types", headers=sent(token))).status)

    await wait_until(lambda: equals(status(admin_token), 200))
    # The limited key was created first, so a cache with the second key has both.
    answers = [await caller.get("/types", headers=sent(token)) for _ in range(6)]
    assert {one.status for one in answers} == {200, 429}
    assert all(int(one.headers["Retry-After"]) >= 1 for one in answers if one.status == 429)
    assert await status(admin_token) == 200
    await wait_until(lambda: equals(status(token), 200))

    assert (await caller.post("/types", {"name": "acme--a"}, headers=sent(admin_token))).status == 201
    await wait_until(lambda: equals(type_creation_status(caller, token), 403))
    assert (await caller.post("/tasks", {"type": "gone"}, headers=sent(admin_token))).status == 422
    assert (await caller.post("/tasks", {"type": "gone"}, headers=sent("pk_x"))).status == 401

    shown: list[tuple[str, int]] = []

    async def are_as_expected() -> bool:
        connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
        try:
            found = await audit.find(connection)
        finally:
            await connection.close()
        assert {row["actor"] for row in found if row["status"] in (403, 429)} <= {f"key:{key_id}"}
        # A busy machine also refuses with 503.
        executed = [row for row in reversed(found) if row["status"] not in (429, 503)]
        shown[:] = [(row["route"], row["status"]) for row in executed]
        return shown == [("POST /types", 201), ("POST /types", 403), ("POST /tasks", 422)]

    try:
        await wait_until(are_as_expected)
    except TimeoutError as error:
        raise AssertionError(f"the audit has {shown}") from error


async def test_readiness_checks_are_cached(caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: /readyz needs no key, so the gateway checks its dependencies at most once a second."""
    checks = []

    async def counted_readiness(probes: Any) -> Any:
        checks.append(probes)
        return await readiness(probes)

    monkeypatch.setattr(pages, "readiness", counted_readiness)
    monkeypatch.setattr(pages, "READINESS_CACHE_S", 3600.0)
    answers = await asyncio.gather(*(caller.get("/readyz") for _ in range(50)))
    assert {one.status for one in answers} <= {200, 503}
    assert len(checks) <= 1


async def test_pending_audit_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: while the audit cannot be written, pending entries are bounded. Entries of successful
    requests are kept, and omitted ones are counted."""
    request_audit = gateway_audit.RequestAudit(cast("Any", None), 1, max_pending=3)
    route = next(name for name, action in RULES.items() if action is Action.SUBMIT)
    monkeypatch.setattr(gateway_audit, "route_of", lambda _request: route)

    class StubRequest(dict[Any, Any]):
        path, remote = "/tasks", None

    request = StubRequest({GRANT: Grant("key:a", frozenset(), None)})
    for status in (201, 429, 503, 503, 429, 201):
        request_audit._add(cast("Any", request), status)
    assert [entry.status for entry in request_audit._pending] == [201, 429, 503, 201]
    assert request_audit._omitted == 2
    with pytest.raises(PostgresUnavailable):
        request_audit.require_room()


async def type_creation_status(caller: Caller, token: str) -> int:
    return int((await caller.post("/types", {"name": "b"}, headers=sent(token))).status)


async def test_an_operator_cannot_configure_a_type(caller, database):
    """O5: an operator may pause and limit a type. Only an admin may change other settings, and a
    submitter none."""
    tokens = {role: (await make_key(database, role, ["acme"]))[1] for role in Role}

    async def keys_are_loaded() -> bool:
        answers = [await caller.get("/types", headers=sent(token)) for token in tokens.values()]
        return all(answer.status in (200, 403) for answer in answers)

    await wait_until(keys_are_loaded)
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


async def test_the_reason_of_a_flow_reveals_no_foreign_task(caller, database):
    """O5, F2: `why` of a flow explains the task that blocks it only to a key that covers that
    task."""
    _, admin_token = await make_key(database, Role.ADMIN)
    _, acme_token = await make_key(database, Role.READER, ["acme"])
    own = await create_resources(caller, database, admin_token, OWN)
    foreign = await create_resources(caller, database, admin_token, FOREIGN)
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        await connection.execute(
            "INSERT INTO flow_node (flow_id, name, status, started_at) VALUES ($1, 'work', 'running', now())",
            own.flow,
        )
        for task, explained in ((own.task, True), (foreign.task, False)):
            await connection.execute(
                "UPDATE task SET flow_id = NULL, flow_node = NULL WHERE flow_id = $1", own.flow
            )
            await connection.execute(
                "UPDATE task SET flow_id = $1, flow_root_id = $1, flow_priority = 2, flow_node = 'work',"
                " flow_generation = 0 WHERE id = $2",
                own.flow,
                task,
            )
            answer = await caller.get(f"/flows/{own.flow}/why", headers=sent(acme_token))
            assert (answer.status, answer.body["path"][0]["task"]) == (200, task)
            assert (answer.body["task"] is not None) == explained
            assert FOREIGN not in repr(answer.body)
            whole = await caller.get(f"/flows/{own.flow}/why", headers=sent(admin_token))
            assert whole.body["task"]["id"] == task
    finally:
        await connection.close()


async def test_each_namespace_has_its_own_operation_ids(caller, database):
    """O5: two namespaces may use the same operation id, and each reads, lists and stops only its
    own operation. A key of both sees the namespace in the id."""
    _, acme_token = await make_key(database, Role.ADMIN, ["acme"])
    _, beta_token = await make_key(database, Role.ADMIN, ["beta"])
    _, both_token = await make_key(database, Role.ADMIN, ["acme", "beta"])
    _, admin_token = await make_key(database, Role.ADMIN)
    for token in (acme_token, beta_token, both_token, admin_token):
        await wait_until(
            lambda token=token: equals(
                type_creation_status(caller, token), 201 if token == admin_token else 403
            )
        )

    async def begin(token: str, name: str, type_name: str) -> Any:
        body = {"id": name, "verb": "pause", "by": "cron", "filter": {"type": type_name}}
        return await caller.post("/operations", body, headers=sent(token))

    async def listed(token: str) -> list[str]:
        answer = await caller.get("/operations", headers=sent(token))
        return sorted(one["id"] for one in answer.body["operations"])

    first = await begin(beta_token, "nightly", FOREIGN)
    assert first.status == 201
    foreign = await begin(acme_token, "nightly", OWN)
    absent = await begin(acme_token, "weekly", OWN)
    assert foreign.status == absent.status == 201
    assert foreign.headers["Location"] == "/operations/nightly"
    assert [*foreign.body] == [*absent.body]
    assert (foreign.body["id"], foreign.body["filter"]) == ("nightly", {"type": OWN})
    # A repeated request finds the operation; another request under its id conflicts.
    assert (await begin(acme_token, "nightly", OWN)).status == 200
    assert (await begin(acme_token, "nightly", "acme--other")).status == 409
    for token, type_name in ((acme_token, OWN), (beta_token, FOREIGN)):
        found = await caller.get("/operations/nightly", headers=sent(token))
        assert found.body["filter"] == {"type": type_name}
    assert await listed(acme_token) == ["nightly", "weekly"]
    assert await listed(beta_token) == ["nightly"]
    stopped = await caller.post("/operations/nightly/stop", {"by": "x"}, headers=sent(acme_token))
    assert (stopped.status, stopped.body["id"]) == (200, "nightly")
    for token in (both_token, admin_token):
        assert await listed(token) == ["nightly", "nightly@acme", "weekly"]
        found = await caller.get("/operations/nightly@acme", headers=sent(token))
        assert found.body["filter"] == {"type": OWN}
    assert (await caller.get("/operations/nightly@acme", headers=sent(beta_token))).status == 404


async def test_operations_by_filter_are_confined(caller, database):
    """O5, F5: a confined key changes by filter only tasks of its namespaces. A foreign type or id
    counts as absent, a filter with neither is rejected, and the audit names the key."""
    acme_id, acme_token = await make_key(database, Role.ADMIN, ["acme", "other"])
    _, beta_token = await make_key(database, Role.ADMIN, ["beta"])
    await wait_until(lambda: equals(type_creation_status(caller, beta_token), 403))
    own = await create_resources(caller, database, acme_token, OWN)
    foreign = await create_resources(caller, database, beta_token, FOREIGN)

    async def cancel(task_filter: dict[str, Any]) -> Any:
        body = {"verb": "cancel", "by": "another name", "filter": task_filter}
        return await caller.post("/operations", body, headers=sent(acme_token))

    refused = await cancel({"states": ["ready"]})
    assert (refused.status, refused.pointers) == (422, ["/filter"])
    for task_filter in (
        {"type": FOREIGN},
        {"ids": [foreign.task]},
        {"type": FOREIGN, "ids": [foreign.task, own.task]},
    ):
        begun = await cancel(task_filter)
        assert (begun.status, begun.body["state"], begun.body["changed"]) == (201, "done", 0), begun.body
        assert begun.body["actor"] == f"key:{acme_id}"
    begun = await cancel({"ids": [foreign.task, own.task]})
    assert begun.body["changed"] == 1
    assert (await caller.get(f"/tasks/{foreign.task}", headers=sent(beta_token))).body["state"] == "ready"
    assert (await caller.get(f"/tasks/{own.task}", headers=sent(acme_token))).body["state"] == "cancelled"


async def test_results_of_foreign_tasks_have_no_effect(caller, database, kafka_servers, prefix):
    """O5, W4: a worker of one namespace can neither send a heartbeat for another namespace's task
    nor end it."""
    _, acme_token = await make_key(database, Role.WORKER, ["acme"])
    _, beta_token = await make_key(database, Role.ADMIN, ["beta"])
    await wait_until(lambda: equals(type_creation_status(caller, beta_token), 403))
    foreign = await create_resources(caller, database, beta_token, FOREIGN)
    kafka = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(kafka, [STAGE_RESULTS, HEARTBEATS])
    entry = {"id": foreign.task, "step": 0, "stage": "start", "attempt": 0}
    results = [{**entry, "outcome": "done"}, {**entry, "outcome": "progress"}]
    answer = await caller.post("/set_task", {"worker": "w", "results": results}, headers=sent(acme_token))
    assert answer.body == {
        "received": 1,
        "accepted": 1,
        "rejected": [],
        "gone": [{"index": 1, "why": "over"}],
    }
    # An allowed result follows under the same worker name, and so in the same partition.
    failed = {**entry, "outcome": "fail", "error": {"kind": "Mine", "message": ""}}
    _, worker = await make_key(database, Role.WORKER, ["beta"])
    await wait_until(lambda: equals(report_status(caller, worker, failed), 200))
    async with running(make_consumer(kafka, None, prefix + STAGE_RESULTS.name)) as consumer:
        record = await consumer.getone()
    assert b"Mine" in record.value


async def report_status(caller: Caller, token: str, entry: Any) -> int:
    body = {"worker": "w", "results": [entry]}
    return int((await caller.post("/set_task", body, headers=sent(token))).status)


async def test_every_answer_has_security_headers(caller, database):
    """O5: every answer, successful or not, forbids browsers to sniff, frame, keep or share it. No
    answer, not even to a preflight request, allows another origin."""
    _, token = await make_key(database, Role.READER)
    cross_origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method, path in (
        ("GET", "/"),
        ("GET", "/types"),
        ("GET", "/nowhere"),
        ("OPTIONS", "/tasks"),
        ("POST", "/tasks"),
        ("GET", "/readyz"),
    ):
        for headers in (cross_origin, {**cross_origin, **sent(token)}):
            async with caller.session.request(method, caller.url + path, headers=headers) as answer:
                answer_headers = answer.headers
            assert not [name for name in answer_headers if name.startswith("Access-Control")], path
            assert answer_headers["X-Content-Type-Options"] == "nosniff"
            assert answer_headers["X-Frame-Options"] == "DENY"
            assert answer_headers["Cache-Control"] == "no-store"
            assert "frame-ancestors 'none'" in answer_headers["Content-Security-Policy"]
            assert answer_headers["Server"] == "penstock"


SECRET = "Authorization: Bearer pk_0123456789abcdef_"


MALFORMED = {
    "a long header": (f"GET /types HTTP/1.1\r\n{SECRET}{'x' * 9_000}\r\n", 431),
    "a long address": (f"GET /types?x={'x' * 9_000} HTTP/1.1\r\n{SECRET}\r\n", 431),
    "many headers": (
        "GET /types HTTP/1.1\r\n" + "".join(f"X-{n}: {SECRET}\r\n" for n in range(200)),
        431,
    ),
    "no HTTP": (f"GET /types HTTP/1.1\r\nno header {SECRET[:9]}\x00\r\n", 400),
}


async def test_a_malformed_request_is_answered_with_a_problem(caller, caplog):
    """O5: the answer to a malformed request is a problem document with the usual headers. Neither
    the answer nor the log repeats the request. A header below the limit is accepted."""
    address = urlsplit(caller.url)
    for name, (head, status) in MALFORMED.items():
        caplog.clear()
        with caplog.at_level("INFO"):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(head.encode() + b"Host: localhost\r\n\r\n")
            answer = await in_time(reader.read())
            writer.close()
        answer_head, _, body = answer.partition(b"\r\n\r\n")
        lines = answer_head.decode().split("\r\n")
        assert int(lines[0].split()[1]) == status, name
        document = json.loads(body)
        assert (document["type"], document["status"]) == ("about:blank", status), name
        headers = {field.lower(): value for field, value in (line.split(": ", 1) for line in lines[1:])}
        assert headers["content-type"].startswith("application/problem+json"), name
        assert headers["x-content-type-options"] == "nosniff", name
        assert headers["server"] == "penstock", name
        assert "pk_" not in answer.decode(), name
        assert "pk_" not in caplog.text, name
        assert "Traceback" not in caplog.text, name
        assert any(getattr(record, "remote", None) == "127.0.0.1" for record in caplog.records), name
    assert (await caller.get("/types", headers={"X-Long": "x" * 8_000})).status == 401


async def test_a_client_that_may_not_send_a_body_is_not_asked_for_it(caller, database):
    """O5: the role, the rate and the declared size are judged before `100 Continue`."""
    port = urlsplit(caller.url).port
    reader = sent((await make_key(database, Role.READER))[1])["Authorization"]
    admin = sent((await make_key(database, Role.ADMIN))[1])["Authorization"]
    head = "POST /types HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue"
    for credentials, length, status in (("Bearer x", 9, 401), (reader, 9, 403), (admin, 9_000_000, 413)):

        async def answered(lines: str, status: int) -> bool:
            return (await raw_request(port, lines)).status == status

        lines = f"{head}\r\nAuthorization: {credentials}\r\nContent-Length: {length}"
        await wait_until(lambda lines=lines, status=status: answered(lines, status))
    lines = f"{head}\r\nAuthorization: {admin}\r\nContent-Length: 2"
    assert (await raw_request(port, lines, b"{}")).status == 100


async def test_no_route_answers_to_a_foreign_host(caller, routes):
    """O5: DNS rebinding reaches no route, also none that is open to all."""
    assert len(routes) > 50
    for route in routes:
        path = re.sub(r"{\w+(:[^}]*)?}", "1", route.resource.canonical)
        answer = await caller.session.request(
            route.method,
            caller.url + path,
            headers={"Host": "evil.example:8420", "Origin": "http://evil.example:8420"},
        )
        assert answer.status == 421, (route.method, path)
        assert route.method == "HEAD" or "evil.example" in (await answer.json(content_type=None))["detail"]
    for host, status in (("localhost", 401), ("[::1]:1", 401), ("127.0.0.1.evil.example", 421)):
        assert (await caller.get("/types", headers={"Host": host})).status == status


async def test_targets_are_confined_to_their_namespaces(caller, database):
    """C8, O5: of one address in two namespaces, each sees, changes and replays its own target. A
    key of several namespaces names one, else `default` is meant. An unknown namespace is
    rejected."""
    acme_token = (await make_key(database, Role.ADMIN, ["acme"]))[1]
    both_token = (await make_key(database, Role.ADMIN, ["acme", "beta"]))[1]
    beta_token = (await make_key(database, Role.ADMIN, ["beta"]))[1]
    admin_token = (await make_key(database, Role.ADMIN))[1]
    await wait_until(lambda: equals(type_creation_status(caller, beta_token), 403))
    own = await create_resources(caller, database, acme_token, OWN)
    foreign = await create_resources(caller, database, beta_token, FOREIGN)

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

    async def change_target(token: str, verb: str, **body: Any) -> Any:
        return await caller.post(f"/targets/{verb}", {"url": own.url, **body}, headers=sent(token))

    acme, beta = ("acme", "disabled"), ("beta", "disabled")
    for state in ({}, {"state": "disabled"}, {"url": own.url}, {"prefix": "https://hook"}):
        assert await listed(acme_token, **state) == [acme]
        assert await listed(beta_token, **state) == [beta]
        assert await listed(both_token, **state) == await listed(admin_token, **state) == [acme, beta]
        assert await listed(both_token, namespace="beta", **state) == [beta]
        assert await listed(admin_token, namespace="beta", **state) == [beta]
        assert await listed(acme_token, namespace="beta", **state) == []
    assert await listed(acme_token, state="normal") == await listed(admin_token, state="normal") == []
    dead = ("acme", "dead"), ("beta", "dead")
    for filters in ({}, {"target": own.url}):
        assert await listed(acme_token, "/callbacks", **filters) == [dead[0]]
        assert (
            await listed(admin_token, "/callbacks", **filters)
            == await listed(both_token, "/callbacks", **filters)
            == [*dead]
        )
        assert await listed(both_token, "/callbacks", namespace="beta", **filters) == [dead[1]]

    assert (await change_target(acme_token, "enable")).body["target"]["namespace"] == "acme"
    assert await listed(admin_token) == [("acme", "normal"), beta]
    # The gateway does not guess between two namespaces, and neither is `default`.
    for verb, more in (("enable", {}), ("disable", {"why": "which?"}), ("limit", {"rate": 1})):
        for token in (both_token, admin_token):
            answer = await change_target(token, verb, **more)
            assert answer.status == 422, answer.body
            assert "acme, beta: give the one that you mean" in str(answer.body)
        answer = await caller.post(
            f"/targets/{verb}", {"url": "https://unknown.example/", **more}, headers=sent(both_token)
        )
        assert (answer.status, "has several namespaces" in str(answer.body)) == (404, True), answer.body
    assert (await change_target(admin_token, "disable", namespace="gamma", why="misspelt")).status == 404
    assert (await change_target(admin_token, "limit", namespace="beta", rate=3)).body["target"]["rate"] == 3
    shared = await change_target(admin_token, "disable", namespace="default", why="all of ours")
    assert shared.body["target"]["namespace"] == "default"
    # Once `default` has the target too, `default` is meant.
    assert (await change_target(admin_token, "limit", rate=None)).body["target"]["namespace"] == "default"
    assert await listed(admin_token) == [("acme", "normal"), beta, ("default", "disabled")]
    assert (await change_target(acme_token, "disable", namespace="acme", why="again")).body["changed"] is True

    async def replayed(token: str, **body: Any) -> tuple[int, int]:
        answer = await caller.post("/callbacks/replay", {"target": own.url, **body}, headers=sent(token))
        assert answer.status == 200, answer.body
        return answer.body["replayed"], answer.body["held"]

    assert (
        await replayed(both_token)
        == await replayed(admin_token)
        == await replayed(acme_token, namespace="beta")
        == (0, 0)
    )
    assert await replayed(acme_token, dry_run=True) == (1, 1)
    assert await replayed(beta_token) == (1, 1)
    assert await listed(admin_token, "/callbacks", state="held") == [("beta", "held")]
    assert (await change_target(acme_token, "enable")).status == 200
    assert await replayed(both_token, namespace="acme") == (1, 0)
    assert await listed(acme_token, "/callbacks", state="pending") == [("acme", "pending")]
    assert await listed(acme_token, "/callbacks", id=foreign.callback) == []


async def test_secrets_of_callbacks_are_confined_to_their_namespaces(caller, database):
    """C7, O5: a confined key creates, lists, rotates and revokes secrets of its namespaces only.

    It cannot name a variable or file of the callbacks service, which may have the secret of another
    namespace, nor change the deployment's secret, which others rely on. Who created a secret is in
    its row and in the audit; no row of the audit has the secret.
    """
    acme_id, acme_token = await make_key(database, Role.ADMIN, ["acme"])
    beta_token = (await make_key(database, Role.ADMIN, ["beta"]))[1]
    admin_token = (await make_key(database, Role.ADMIN))[1]
    await wait_until(lambda: equals(type_creation_status(caller, beta_token), 403))
    for token, name in ((acme_token, OWN), (beta_token, FOREIGN)):
        assert (await caller.post("/types", {"name": name}, headers=sent(token))).status == 201
    url = "https://hook.example/"

    async def create(token: str, status: int = 201, **body: Any) -> Any:
        answer = await caller.post("/targets/secrets", body, headers=sent(token))
        assert answer.status == status, answer.body
        return answer.body

    async def listed(token: str, **query: str) -> list[str]:
        found: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            answer = await caller.get(
                "/targets/secrets", params={**query, **cursor, "limit": "1"}, headers=sent(token)
            )
            assert answer.status == 200, answer.body
            found += [secret["id"] for secret in answer.body["secrets"]]
            if answer.body["next"] is None:
                return found
            cursor = {"cursor": answer.body["next"]}

    own = await create(acme_token)
    assert (own["namespace"], own["url"], own["created_by"]) == ("acme", None, f"key:{acme_id}")
    of_target = await create(acme_token, url=url)
    foreign = await create(beta_token, url=url)
    deployment = await create(admin_token, namespace="*")
    by_reference = await create(admin_token, namespace="acme", reference="env:ACME")
    for namespace in ("beta", "*", "nobody"):
        await create(acme_token, 404, namespace=namespace)
    await create(acme_token, 404, namespace="beta", url=url)
    await create(acme_token, 403, reference="env:BETA")
    for verb, method in (("/rotate", "POST"), ("", "DELETE")):
        for secret in (foreign, deployment):
            answer = await call(
                caller,
                acme_token,
                method,
                f"/targets/secrets/{secret['id']}{verb}",
                {} if verb else None,
            )
            assert answer.status == 404, answer.body
    refused = await caller.post(
        f"/targets/secrets/{own['id']}/rotate", {"reference": "env:BETA"}, headers=sent(acme_token)
    )
    assert refused.status == 403
    in_acme = {own["id"], of_target["id"], by_reference["id"]}
    assert set(await listed(acme_token)) == in_acme
    assert await listed(acme_token, url=url) == [of_target["id"]]
    assert await listed(acme_token, namespace="beta") == await listed(acme_token, namespace="*") == []
    everything = await listed(admin_token)
    assert set(everything) == {*in_acme, foreign["id"], deployment["id"]}
    assert len(everything) == 5
    assert await listed(admin_token, namespace="*") == [deployment["id"]]

    connection = await asyncpg.connect(database)
    try:

        async def audited() -> bool:
            rows = await connection.fetch(
                "SELECT * FROM penstock.audit_request WHERE actor = $1 AND route LIKE '%/targets/secrets%'",
                f"key:{acme_id}",
            )
            assert own["secret"] not in repr(rows)
            statuses = [row["status"] for row in rows if row["route"] == "POST /targets/secrets"]
            return sorted(statuses) == [201, 201, 403, 404, 404, 404, 404]

        await wait_until(audited)
    finally:
        await connection.close()
