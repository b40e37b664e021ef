"""`penstock keys`, and API keys sent by the command line, clients and workers over HTTP."""

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
from tests.support.api_keys import gateway_with_keys, make_key
from tests.support.waiting import wait_until

from penstock.cli.main import cli
from penstock.client import Client
from penstock.core.access import Role
from penstock.errors import Forbidden, SettingsError, Unauthenticated
from penstock.http.credentials import Credentials
from penstock.postgres import audit
from penstock.postgres.connection import connect
from penstock.worker.gateway_client import GatewayClient


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


async def test_a_secret_is_printed_once_and_never_stored(invoke, database) -> None:
    """O5: `create` and `rotate` print the secret, alone on standard output. Neither the list nor
    the database contains it."""
    created = await invoke(
        "keys", "create", "shop", "--role", "submitter", "--namespace", "shop", "--expires", "90d"
    )
    assert created.exit_code == 0, created.output
    token = created.stdout.strip()
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
    # The new key is valid for as long as the old one.
    left = datetime.fromisoformat(rotated["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90)
    again = await invoke("keys", "rotate", rotated["id"])
    # `penstock keys rotate ID > new.key` must write the key and nothing else.
    assert re.fullmatch(r"pk_[0-9a-f]{16}_[\w-]+\n", again.stdout)
    assert f"{rotated['id']} is valid until" in again.stderr
    assert "is revoked" in (await invoke("keys", "revoke", key_id)).stdout
    assert json.loads((await invoke("keys", "revoke", key_id, "--json")).stdout)["changed"] is False
    audit_entries = [
        json.loads(line) for line in (await invoke("keys", "audit", "--json")).stdout.splitlines()
    ]
    verbs = ("revoke", "rotate", "create")
    assert [(one["route"], one["path"]) for one in audit_entries if one["path"] == key_id] == [
        (f"penstock keys {v}", key_id) for v in verbs
    ]
    assert all(one["actor"].startswith("cli:") for one in audit_entries)
    changes = {one["route"]: one["change"] for one in audit_entries if one["path"] == key_id}
    created_key = changes["penstock keys create"]["after"]
    assert (created_key["role"], created_key["namespaces"]) == ("submitter", ["shop"])
    assert changes["penstock keys rotate"]["new"]["id"] == rotated["id"]
    assert changes["penstock keys revoke"]["after"] == {"revoked": True}
    assert secret.rpartition("_")[2] not in json.dumps(audit_entries)
    table = (await invoke("keys", "list")).stdout
    assert "revoked" in table
    assert secret not in table
    connection = await asyncpg.connect(database)
    rows = await connection.fetch("SELECT * FROM penstock.api_key")
    await connection.close()
    assert secret not in repr([tuple(row) for row in rows])


async def test_a_mistake_gives_its_status_and_message(invoke) -> None:
    """O8: a mistake gives the status of its kind and a message, and creates no key."""
    reader = ("create", "a", "--role", "reader")
    for arguments, status, message in (
        (("create", "a", "--role", "boss"), 2, "boss"),
        ((*reader, "--namespace", "a--b"), 2, "a--b"),
        ((*reader, "--namespace", "*", "--namespace", "a"), 2, "all namespaces"),
        ((*reader, "--expires", "soon"), 2, "90d"),
        ((*reader, "--expires", "0s"), 2, "is zero"),
        ((*reader, "--expires", "999999999d"), 2, "too long"),
        ((*reader, "--rate", "0"), 2, "rate"),
        (("create", " ", "--role", "reader"), 2, "NAME"),
        (("rotate", "0123456789abcdef"), 4, "no key"),
        (("revoke", "0123456789abcdef"), 4, "no key"),
    ):
        outcome = await invoke("keys", *arguments)
        assert outcome.exit_code == status, (arguments, outcome.output)
        assert message in outcome.stderr, arguments
    assert (await invoke("keys", "list", "--json")).stdout == ""


async def test_clients_the_command_line_and_workers_send_their_api_key(
    invoke, kafka_servers, prefix, database, tmp_path, monkeypatch
) -> None:
    """O5: clients, the command line and HTTP workers send PENSTOCK_API_KEY. Without a sufficient
    key, each reports an error with the remedy."""
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
        body = {"worker": "w", "type": "media", "wait_s": 0}
        async with GatewayClient(gateway.url, Credentials(worker)) as gateway_client:
            assert (await gateway_client.post("/set_task", {"worker": "w", "results": []}))[0][
                "accepted"
            ] == 0
        for wrong in ("", reader):
            async with GatewayClient(gateway.url, Credentials(wrong)) as gateway_client:
                with pytest.raises(SettingsError, match="PENSTOCK_API_KEY"):
                    await gateway_client.post("/hold_task", body)


async def test_a_client_reads_a_rotated_key_file_again(
    invoke, kafka_servers, prefix, database, tmp_path, monkeypatch
) -> None:
    """O5: clients and the command line read PENSTOCK_API_KEY_FILE. A client reads the file again
    when its key is revoked, and reports an error until it has a valid key."""
    key_file = tmp_path / "key"
    first_id, first = await make_key(database, Role.ADMIN)
    _, second = await make_key(database, Role.ADMIN)
    key_file.write_text(first)
    monkeypatch.setenv("PENSTOCK_API_KEY_FILE", str(key_file))
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
            for content, message in (
                ("", "is empty"),
                ("no key", "holds no API key"),
                (None, "cannot be read"),
            ):
                key_file.unlink() if content is None else key_file.write_text(content)
                with pytest.raises(Unauthenticated, match=rf"; PENSTOCK_API_KEY_FILE='{key_file}' {message}"):
                    await client.types()
            key_file.write_text(second)
            assert [one["name"] for one in await client.types()] == ["media"]
            assert (await client.submit("media", {"n": 1})).created


async def test_a_generated_key_is_registered_once(
    invoke, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O5: `--drawn` registers a secret that the deployment has generated. A repetition changes
    nothing, and does not restore a revoked key."""
    create = ("keys", "create", "deployment", "--role", "admin", "--drawn")
    for invalid in ("", "pk_0123456789abcdef_short", "pk_nothex_" + "a" * 64):
        monkeypatch.setenv("PENSTOCK_API_KEY", invalid)
        refused = await invoke(*create)
        assert refused.exit_code == 2
        assert "make .env" in refused.output
    token = "pk_0123456789abcdef_" + "5e" * 32
    monkeypatch.setenv("PENSTOCK_API_KEY", token)
    for _ in range(2):
        created = await invoke(*create)
        assert created.stderr == "API key 0123456789abcdef (deployment, admin) is valid\n", created.output
        assert created.stdout == ""
    [shown] = [json.loads(line) for line in (await invoke("keys", "list", "--json")).stdout.splitlines()]
    assert (shown["id"], shown["role"]) == ("0123456789abcdef", "admin")
    monkeypatch.setenv("PENSTOCK_API_KEY", token.replace("5e", "5f"))
    conflict = await invoke(*create)
    assert conflict.exit_code != 0
    assert "another secret" in conflict.output
    monkeypatch.setenv("PENSTOCK_API_KEY", token)
    await invoke("keys", "revoke", "0123456789abcdef")
    refused = await invoke(*create)
    assert refused.exit_code != 0
    assert "is revoked: generate another one" in refused.output


async def test_the_audit_is_listed(invoke, database: str) -> None:
    """O5: the audit lists requests with their actor, latest first, by actor and in pages, as text
    and as JSON."""
    assert "no such requests" in (await invoke("keys", "audit")).output
    connection = await connect(database, "test")
    await audit.write(
        connection,
        [
            (datetime.now(UTC), actor, "POST /tasks", "/tasks", status, "10.0.0.7", None)
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
