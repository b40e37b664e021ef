"""Who may ask what: each role and each namespace against each route of the router, and keys over their lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import asyncpg
import pytest
from tests.access import make_key, sent
from tests.gateways import Caller, running_gateway
from tests.waiting import wait_until

from penstock.core.access import ALLOWED, Role
from penstock.gateway import app as gateway_app
from penstock.gateway.rules import RULES

FOREIGN, OWN = "beta--render", "acme--render"
NOBODYS_ID = 9_400_000
LEASE = {"worker": "w", "stage": "start", "step": 0, "attempt": 0}


class Things(NamedTuple):
    """What a namespace has."""

    type: str
    task: int
    operation: str
    callback: str


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
    async with running_gateway(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects=f"file://{tmp_path}",
        gateway_auth="keys",
        gateway_key_rate=0.0,
    ) as caller:
        await wait_until(caller.is_ready)
        yield caller


async def call(caller: Caller, token: str | None, route: str, path: str, body: Any) -> Any:
    method = route.partition(" ")[0]
    more: dict[str, Any] = {} if body is None else {"json": body}
    headers = sent(token) if token else {}
    return await caller._call(method, path, headers=headers, **more)


async def things(caller: Caller, database: str, token: str, type_name: str) -> Things:
    """A type with a task, an operation about it and a callback that is dead."""
    headers = sent(token)
    assert (await caller.post("/types", {"name": type_name}, headers=headers)).status == 201
    task = (await caller.post("/tasks", {"type": type_name, "context": 1}, headers=headers)).body["id"]
    asked = {"verb": "reprioritise", "priority": "HIGH", "by": "test", "filter": {"type": type_name}}
    operation = (await caller.post("/operations", asked, headers=headers)).body["id"]
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(
            "INSERT INTO penstock.callback (id, target, task_id, state, body, due_at, finished_at) "
            "VALUES ($1, 'https://hook.example/', $2, 'dead', '', now(), now())",
            f"cb-{task}",
            task,
        )
    finally:
        await connection.close()
    return Things(type_name, task, operation, f"cb-{task}")


def request_of(route: str, of: Things, kind: str) -> tuple[str, Any]:
    """A request to a route about what somebody has, that would be taken; a new route needs one here."""
    name, task = of.type, of.task
    entry = {**LEASE, "id": task, "outcome": "progress"}
    del entry["worker"]
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
        "GET /targets": ("/targets", None),
        "POST /targets/disable": ("/targets/disable", {"url": "https://hook.example/", "why": "test"}),
        "POST /targets/enable": ("/targets/enable", {"url": "https://hook.example/"}),
        "POST /targets/limit": ("/targets/limit", {"url": "https://hook.example/", "rate": 1.0}),
        "GET /callbacks": (f"/callbacks?id={of.callback}", None),
        "POST /callbacks/replay": ("/callbacks/replay", {"ids": [of.callback], "dry_run": True}),
        "POST /operations": (
            "/operations",
            {"verb": "pause", "by": "test", "filter": {"ids": [task]}, "dry_run": True},
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
    for name in (of.type, str(of.task), of.operation, of.callback):
        text = text.replace(name, "?")
    return text


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
    names = sorted({f"{'GET' if r.method == 'HEAD' else r.method} {r.resource.canonical}" for r in routes})
    assert len(names) > 30
    before = await state_of(database, FOREIGN)

    # What cancels comes last: all others are asked about tasks that live.
    for route in sorted(names, key=lambda name: ("cancel" in name, name)):
        rule = RULES[route]
        path, body = request_of(route, own, "own")
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
            assert (mine.status == 403) != (may and not rule.everywhere), (route, role, mine.body)
            if may and not rule.everywhere:
                assert mine.status in (200, 201, 409), (route, role, mine.body)
                await require_foreign_is_absent(caller, confined[role], route, foreign, absent)
    assert await state_of(database, FOREIGN) == before


async def require_foreign_is_absent(
    caller: Caller, token: str, route: str, foreign: Things, absent: Things
) -> None:
    path, body = request_of(route, foreign, "foreign")
    theirs = await call(caller, token, route, path, body)
    for name in (FOREIGN, str(foreign.task), foreign.operation, foreign.callback):
        said = repr(body) + path
        assert name in said or name not in repr(theirs.body), (route, theirs.body)
    if route == "POST /types":
        # Whether it is there or not: by its name alone.
        assert theirs.status == 403
        assert "acme" in theirs.body["detail"]
        return
    path, body = request_of(route, absent, "absent")
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
        return [[tuple(row) for row in rows] for rows in (tasks, types, keys, audit, callbacks)]
    finally:
        await connection.close()
