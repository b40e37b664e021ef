"""The audit keeps what a request changed: before and after, or the request; never a secret."""

from __future__ import annotations

import base64
import json
from typing import Any

import asyncpg
import pytest
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller
from tests.support.waiting import wait_until

from penstock.core.access import Role
from penstock.gateway.changes import MAX_BYTES
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS, REVOKED
from penstock.settings import Kafka

SECRET = "hunter2-never-shown"
HOOK = "https://hook.example/"


class Audited:
    """A gateway with one admin key, and the audit's entries."""

    def __init__(self, caller: Caller, database: str, token: str) -> None:
        self._caller = caller
        self._database = database
        self._token = token
        self._seen = 0

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Sends a request, which must succeed."""
        more = {} if body is None else {"json": body}
        answer = await self._caller._call(method, path, headers=sent(self._token), **more)
        assert answer.status < 300, answer.body
        return answer.body

    async def change(self) -> dict[str, Any]:
        """What the last request changed, by its new entry."""

        async def found() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(self._database)
            try:
                return await connection.fetch(
                    "SELECT seq, change::text FROM penstock.audit_request WHERE seq > $1 ORDER BY seq",
                    self._seen,
                )
            finally:
                await connection.close()

        [row] = await wait_until(found, what="the request is in the audit")
        self._seen = row["seq"]
        assert SECRET not in row["change"]
        change: dict[str, Any] = json.loads(row["change"])
        return change


@pytest.fixture
async def audited(kafka_servers, prefix, database, tmp_path):
    # The gateway publishes to these topics; a missing topic delays its stop.
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [EVENTS, REVOKED])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        _, token = await make_key(database, Role.ADMIN)

        async def is_known() -> bool:
            return bool((await caller.get("/types", headers=sent(token))).status == 200)

        await wait_until(is_known)
        yield Audited(caller, database, token)


def type_body(**settings: Any) -> dict[str, Any]:
    return {"name": "t", "callbacks": [{"url": HOOK, "headers": {"Authorization": SECRET}}], **settings}


async def test_changes_of_types_are_kept(audited: Audited) -> None:
    """O5: a new type is kept as a whole, a changed one by the fields that differ. The value of a
    callback's header is never kept, and its change shows."""
    await audited.call("POST", "/types", type_body(lease_ms=5_000))
    change = await audited.change()
    assert (change["type"], change["before"], change["after"]["lease_ms"]) == ("t", None, 5_000)
    assert change["after"]["callbacks"][0]["url"] == HOOK
    await audited.call("PATCH", "/types/t", {"lease_ms": 9_000, "paused": True})
    assert await audited.change() == {
        "type": "t",
        "before": {"lease_ms": 5_000, "paused": False},
        "after": {"lease_ms": 9_000, "paused": True},
    }
    other = [{"url": HOOK, "headers": {"Authorization": SECRET + "2"}}]
    await audited.call("PATCH", "/types/t", {"callbacks": other})
    change = await audited.change()
    assert change["before"].keys() == change["after"].keys() == {"callbacks"}


async def test_changes_of_concurrency_keys_are_kept(audited: Audited) -> None:
    """O5: the settings of a concurrency key are kept before and after a change."""
    await audited.call("POST", "/types", {"name": "t"})
    await audited.change()
    await audited.call("POST", "/types/t/keys", {"key": "k", "weight": 2})
    change = await audited.change()
    assert (change["key"], change["before"], change["after"]["weight"]) == ("k", None, 2)
    await audited.call("POST", "/types/t/keys", {"key": "k", "paused": True})
    change = await audited.change()
    assert (change["before"], change["after"]) == ({"paused": False}, {"paused": True})
    await audited.call("POST", "/types/t/keys/reset", {"key": "k"})
    change = await audited.change()
    assert (change["before"]["weight"], change["after"]) == (2, None)


async def test_changes_of_targets_are_kept(audited: Audited) -> None:
    """O5: state, reason and rate of a target are kept before and after a change."""
    await audited.call("POST", "/targets/disable", {"url": HOOK, "why": "gone"})
    change = await audited.change()
    assert (change["url"], change["namespace"], change["before"]) == (HOOK, "default", None)
    assert (change["after"]["state"], change["after"]["why"]) == ("disabled", "gone")
    await audited.call("POST", "/targets/limit", {"url": HOOK, "rate": 2.5})
    change = await audited.change()
    assert (change["before"], change["after"]) == ({"rate": None}, {"rate": 2.5})
    await audited.call("POST", "/targets/enable", {"url": HOOK})
    change = await audited.change()
    assert (change["before"]["state"], change["after"]["state"]) == ("disabled", "normal")


async def test_changes_of_secrets_are_kept(audited: Audited) -> None:
    """C7, O5: what a secret signs for, its state and its public key are kept, and never the secret,
    whether it was generated or given."""
    given = "whsec_" + base64.b64encode(SECRET.encode() * 2).decode()
    created = await audited.call("POST", "/targets/secrets", {"url": HOOK, "secret": given})
    change = await audited.change()
    assert (change["secret"], change["before"], change["after"]["url"]) == (created["id"], None, HOOK)
    assert given.removeprefix("whsec_") not in json.dumps(change)
    path = f"/targets/secrets/{created['id']}"
    new = await audited.call("POST", f"{path}/rotate", {"overlap_s": 60})
    change = await audited.change()
    assert (change["old"]["state"], change["new"]["id"]) == ("replaced", new["id"])
    assert new["secret"].removeprefix("whsec_") not in json.dumps(change)
    await audited.call("DELETE", path)
    change = await audited.change()
    assert (change["before"]["state"], change["after"]["state"]) == ("replaced", "revoked")
    await audited.call("POST", "/targets/secrets/reencrypt")
    assert (await audited.change())["reencrypted"] == 0


async def test_changes_of_schedules_are_kept(audited: Audited) -> None:
    """O5: a schedule is kept before and after a change, a pause and a removal, without headers."""
    await audited.call("POST", "/types", {"name": "t"})
    await audited.change()
    definition = {"flow": "f", "version": 1, "nodes": {"work": {"kind": "task", "type": "t"}}}
    await audited.call("POST", "/flow-definitions", definition)
    assert await audited.change() == {"definition": "f", "version": 1, "created": True}
    schedule = {"flow": "f", "cron": "0 2 * * *", "callbacks": type_body()["callbacks"]}
    await audited.call("PUT", "/schedules/s", schedule)
    change = await audited.change()
    assert (change["before"], change["after"]["cron"]) == (None, "0 2 * * *")
    await audited.call("PUT", "/schedules/s", {**schedule, "cron": "0 3 * * *"})
    change = await audited.change()
    assert (change["before"]["cron"], change["after"]["cron"]) == ("0 2 * * *", "0 3 * * *")
    await audited.call("POST", "/schedules/s/pause")
    change = await audited.change()
    assert (change["before"]["paused"], change["after"]["paused"]) == (False, True)
    await audited.call("DELETE", "/schedules/s")
    change = await audited.change()
    assert (change["before"]["cron"], change["after"]) == ("0 3 * * *", None)


async def test_requests_for_operations_are_kept(audited: Audited) -> None:
    """O5: the filter and the verb of an operation are kept. A change with too many bytes is kept as
    its size."""
    await audited.call("POST", "/types", {"name": "t"})
    await audited.change()
    filters = {"type": "t", "states": ["ready"]}
    body = {"verb": "pause", "by": "ann", "filter": filters}
    operation = (await audited.call("POST", "/operations", body))["id"]
    change = await audited.change()
    assert change == {"operation": operation, "created": True, "request": body}
    await audited.call("POST", f"/operations/{operation}/stop", {"by": "bob"})
    change = await audited.change()
    assert change.keys() == {"before", "after"}
    ids = list(range(1_000_000_000, 1_000_000_000 + MAX_BYTES // 10))
    await audited.call("POST", "/operations", {"verb": "pause", "by": "ann", "filter": {"ids": ids}})
    change = await audited.change()
    assert change["omitted"]
    assert change["bytes"] > MAX_BYTES
