"""`penstock keys`, and those who send what it shows: command line, clients and workers over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner, Result
from tests.access import gateway_with_keys, make_key
from tests.waiting import wait_until

from penstock.cli.main import cli
from penstock.client import Client
from penstock.core.access import Role
from penstock.errors import Forbidden, SettingsError, Unauthenticated
from penstock.http.tokens import Credentials
from penstock.postgres import audit
from penstock.postgres.connection import connect
from penstock.worker.asking import Gateway


@pytest.fixture
def invoke(database: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") and not name.startswith("PENSTOCK_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_POSTGRES", database)

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, cli, list(arguments))

    return run


async def test_a_secret_is_shown_once_and_kept_nowhere(invoke, database) -> None:
    """O5: `create` and `rotate` show it, alone on standard output; the list never does, nor has the database anything of it."""
    made = await invoke(
        "keys", "create", "shop", "--role", "submitter", "--namespace", "shop", "--expires", "90d"
    )
    assert made.exit_code == 0, made.output
    token = made.stdout.strip()
    _, key_id, secret = token.split("_", 2)
    [shown] = [json.loads(line) for line in (await invoke("keys", "list", "--json")).stdout.splitlines()]
    assert (shown["id"], shown["role"], shown["namespaces"], shown["state"]) == (
        key_id,
        "submitter",
        ["shop"],
        "valid",
    )
    assert secret not in json.dumps(shown)
    rotated = json.loads((await invoke("keys", "rotate", key_id, "--overlap", "2h", "--json")).stdout)
    assert rotated["secret"].startswith(f"pk_{rotated['id']}_")
    assert (rotated["name"], rotated["role"], rotated["namespaces"]) == ("shop", "submitter", ["shop"])
    states = {
        one["id"]: one["state"]
        for one in map(json.loads, (await invoke("keys", "list", "--json")).stdout.splitlines())
    }
    assert states == {key_id: "replaced", rotated["id"]: "valid"}
    # As long as the one whose place it takes.
    left = datetime.fromisoformat(rotated["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90)
    again = await invoke("keys", "rotate", rotated["id"])
    # What `penstock keys rotate ID > new.key` writes is a key, and nothing else.
    assert re.fullmatch(r"pk_[0-9a-f]{16}_[\w-]+\n", again.stdout)
    assert f"{rotated['id']} holds until" in again.stderr
    assert "is revoked" in (await invoke("keys", "revoke", key_id)).stdout
    assert json.loads((await invoke("keys", "revoke", key_id, "--json")).stdout)["changed"] is False
    noted = [json.loads(line) for line in (await invoke("keys", "audit", "--json")).stdout.splitlines()]
    verbs = ("revoke", "rotate", "create")
    assert [(one["route"], one["path"]) for one in noted if one["path"] == key_id] == [
        (f"penstock keys {v}", key_id) for v in verbs
    ]
    assert all(one["actor"].startswith("cli:") for one in noted)
    table = (await invoke("keys", "list")).stdout
    assert "revoked" in table
    assert secret not in table
    connection = await asyncpg.connect(database)
    kept = await connection.fetch("SELECT * FROM penstock.api_key")
    await connection.close()
    assert secret not in repr([tuple(row) for row in kept])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("create", "a", "--role", "boss"), 2, "boss"),
        (("create", "a", "--role", "reader", "--namespace", "a--b"), 2, "a--b"),
        (("create", "a", "--role", "reader", "--namespace", "*", "--namespace", "a"), 2, "all namespaces"),
        (("create", "a", "--role", "reader", "--expires", "soon"), 2, "90d"),
        (("create", "a", "--role", "reader", "--expires", "0s"), 2, "before it begins"),
        (("create", "a", "--role", "reader", "--expires", "999999999d"), 2, "too long"),
        (("create", "a", "--role", "reader", "--rate", "0"), 2, "rate"),
        (("create", " ", "--role", "reader"), 2, "NAME"),
        (("rotate", "0123456789abcdef"), 4, "no key"),
        (("revoke", "0123456789abcdef"), 4, "no key"),
    ],
)
async def test_mistakes_are_told_precisely(invoke, arguments, status, said) -> None:
    """O8: with the status of their kind, and nothing made."""
    outcome = await invoke("keys", *arguments)
    assert outcome.exit_code == status, outcome.output
    assert said in outcome.stderr
    assert (await invoke("keys", "list", "--json")).stdout == ""


async def test_clients_the_command_line_and_workers_send_their_key(
    invoke, kafka_servers, prefix, database, tmp_path, monkeypatch
) -> None:
    """O5: PENSTOCK_API_KEY lets clients, the command line and HTTP workers in; without, or with one that may not, each says so
    and what to do."""
    _, admin = await make_key(database, Role.ADMIN)
    _, reader = await make_key(database, Role.READER)
    _, worker = await make_key(database, Role.WORKER)
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as gateway:
        monkeypatch.setenv("PENSTOCK_GATEWAY", gateway.url)
        refused = await invoke("types", "add", "media")
        assert refused.exit_code == 3
        assert "PENSTOCK_API_KEY" in refused.stderr
        async with Client(api_key="pk_0123456789abcdef_x") as client:
            with pytest.raises(Unauthenticated):
                await client.types()
        monkeypatch.setenv("PENSTOCK_API_KEY", admin)
        assert (await invoke("types", "add", "media")).exit_code == 0
        async with Client() as client:
            assert (await client.submit("media", 1)).created
        async with Client(api_key=reader) as client:
            assert [one["name"] for one in await client.types()] == ["media"]
            with pytest.raises(Forbidden, match="submit"):
                await client.submit("media", 1)
        asking = {"worker": "w", "type": "media", "wait_s": 0}
        async with Gateway(gateway.url, Credentials(worker)) as link:
            assert (await link.post("/set_task", {"worker": "w", "results": []}))[0]["accepted"] == 0
        for wrong in ("", reader):
            async with Gateway(gateway.url, Credentials(wrong)) as link:
                with pytest.raises(SettingsError, match="PENSTOCK_API_KEY"):
                    await link.post("/hold_task", asking)


async def test_a_key_in_a_file_is_rotated_under_those_who_use_it(
    invoke, kafka_servers, prefix, database, tmp_path, monkeypatch
) -> None:
    """O5: a client and the command line read PENSTOCK_API_KEY_FILE, and the client reads it again when its key has been revoked;
    until then it says that it is refused."""
    file = tmp_path / "key"
    first_id, first = await make_key(database, Role.ADMIN)
    _, second = await make_key(database, Role.ADMIN)
    file.write_text(first)
    monkeypatch.setenv("PENSTOCK_API_KEY_FILE", str(file))
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as gateway:
        monkeypatch.setenv("PENSTOCK_GATEWAY", gateway.url)
        assert (await invoke("types", "add", "media")).exit_code == 0
        async with Client() as client:
            await client.types()
            assert (await invoke("keys", "revoke", first_id)).exit_code == 0

            async def refused() -> bool:
                try:
                    await client.types()
                except Unauthenticated:
                    return True
                return False

            await wait_until(refused)
            for content, told in (("", "is empty"), ("no key", "holds no API key"), (None, "cannot be read")):
                file.unlink() if content is None else file.write_text(content)
                with pytest.raises(Unauthenticated, match=rf"; api_key_file='{file}' {told}"):
                    await client.types()
            file.write_text(second)
            assert [one["name"] for one in await client.types()] == ["media"]
            assert (await client.submit("media", {"n": 1})).created


async def test_a_key_that_was_drawn_before_is_made_known_once(
    invoke, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O5: a deployment brings the secret of its first key along; done again it changes nothing, and opens nothing again."""
    create = ("keys", "create", "deployment", "--role", "admin", "--drawn")
    for poor in ("", "pk_0123456789abcdef_short", "pk_nothex_" + "a" * 64):
        monkeypatch.setenv("PENSTOCK_API_KEY", poor)
        refused = await invoke(*create)
        assert refused.exit_code == 2
        assert "make .env" in refused.output
    token = "pk_0123456789abcdef_" + "5e" * 32
    monkeypatch.setenv("PENSTOCK_API_KEY", token)
    for _ in range(2):
        made = await invoke(*create)
        assert made.stderr == "key 0123456789abcdef (deployment, admin) is valid\n", made.output
        assert made.stdout == ""
    [shown] = [json.loads(line) for line in (await invoke("keys", "list", "--json")).stdout.splitlines()]
    assert (shown["id"], shown["role"]) == ("0123456789abcdef", "admin")
    monkeypatch.setenv("PENSTOCK_API_KEY", token.replace("5e", "5f"))
    other = await invoke(*create)
    assert other.exit_code != 0
    assert "another secret" in other.output
    monkeypatch.setenv("PENSTOCK_API_KEY", token)
    await invoke("keys", "revoke", "0123456789abcdef")
    refused = await invoke(*create)
    assert refused.exit_code != 0
    assert "is revoked: draw another" in refused.output


async def test_the_audit_is_listed(invoke, database: str) -> None:
    """O5: who asked for what, latest first, of one actor, a page after the other; for people and for programs."""
    assert "no such requests" in (await invoke("keys", "audit")).output
    connection = await connect(database, "test")
    await audit.write(
        connection,
        [
            (datetime.now(UTC), actor, "POST /tasks", "/tasks", status, "10.0.0.7")
            for actor, status in (("key:a", 201), ("oidc:b", 403), ("key:a", 429))
        ],
    )
    await connection.close()
    lines = [json.loads(line) for line in (await invoke("keys", "audit", "--json")).stdout.splitlines()]
    assert [(one["actor"], one["status"]) for one in lines] == [
        ("key:a", 429),
        ("oidc:b", 403),
        ("key:a", 201),
    ]
    page = await invoke("keys", "audit", "--actor", "key:a", "--before", str(lines[0]["seq"]), "--json")
    assert [json.loads(line)["status"] for line in page.stdout.splitlines()] == [201]
    shown = (await invoke("keys", "audit", "--limit", "1")).stdout
    assert "429" in shown
    assert "oidc:b" not in shown
