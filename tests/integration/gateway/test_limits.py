"""Limits and concurrency keys over HTTP, by the Python client and on the command line."""

from __future__ import annotations

import pytest
from tests.integration.cli.test_cli import penstock
from tests.support.gateways import running_gateway
from tests.support.invoking import documents

from penstock.client import Client
from penstock.errors import InvalidRecord, NotFound

__all__ = ["penstock"]  # fixture


@pytest.fixture
async def caller(where):
    async with running_gateway(**where) as caller:
        assert (await caller.post("/types", {"name": "media", "lease_ms": 5000})).status == 201
        yield caller


BAD_TYPES = {
    "max_in_flight": (0, 2**31, 1.5, "many", True),
    "starts_per_s": (0, -1, 1_000_001, "fast"),
    "max_per_key": (0, "few"),
    "fair": (None, 1),
    "paused": (None, "yes"),
    "name": ("other",),
    "partitions": (9,),
    "nonsense": (1,),
}


async def test_a_patch_changes_only_the_given_fields(caller):
    """S5: PATCH changes only the given fields, and null removes a limit. A mistake is named by its
    field and changes nothing. Registration keeps a pause."""
    changed = await caller.session.patch(
        f"{caller.url}/types/media", json={"paused": True, "max_in_flight": 5.0}
    )
    assert changed.status == 200
    body = await changed.json()
    assert (body["paused"], body["max_in_flight"], body["lease_ms"]) == (True, 5, 5000)
    for field, values in BAD_TYPES.items():
        for value in values:
            async with caller.session.patch(f"{caller.url}/types/media", json={field: value}) as answer:
                document = await answer.json()
                assert answer.status == 422, (field, value)
                found = [error["pointer"] for error in document.get("errors", [])] or [
                    document.get("pointer")
                ]
                assert f"/{field}" in found or field == "nonsense", (field, value, document)
    for wrong in ({}, [], "paused"):
        async with caller.session.patch(f"{caller.url}/types/media", json=wrong) as answer:
            assert answer.status == 422
    async with caller.session.patch(f"{caller.url}/types/unknown", json={"paused": True}) as answer:
        assert answer.status == 404
    assert (await caller.get("/types/media")).body == body
    again = await caller.post("/types", {"name": "media"})
    assert (again.body["paused"], again.body["max_in_flight"]) == (True, None)


async def test_concurrency_keys_keep_every_character(caller):
    """S5: a concurrency key keeps every character of the submission. Pages are ordered by key, and
    a task without a key shows none."""
    assert (await caller.post("/types", {"name": "media", "fair": True})).status == 200
    unusual_key = "a/ü %2F\n?"
    for concurrency_key in (unusual_key, "b", "c"):
        assert (await caller.post("/types/media/keys", {"key": concurrency_key, "weight": 2})).body[
            "paused"
        ] is False
    async with Client(caller.url) as client:
        found = [entry["key"] async for entry in client.keys("media")]
        assert found == sorted([unusual_key, "b", "c"])
        one = await client.change_key("media", unusual_key, max_in_flight=3)
        assert (one["weight"], one["max_in_flight"], one["in_flight"]) == (2, 3, 0)
        assert (await client.change_key("media", unusual_key, max_in_flight=None))["max_in_flight"] is None
        assert await client.reset_key("media", "b")
        assert not await client.reset_key("media", "b")
        keyed = await client.submit("media", key=unusual_key)
        bare = await client.submit("media")
        assert (await client.get(keyed.id)).raw["key"] == unusual_key
        assert (await client.get(bare.id)).raw["key"] is None
        for concurrency_key, settings in (
            ("", {"weight": 1}),
            ("k" * 201, {"weight": 1}),
            ("k", {"weight": 0}),
            ("k", {}),
        ):
            with pytest.raises(InvalidRecord):
                await client.change_key("media", concurrency_key, **settings)
        with pytest.raises(NotFound):
            await client.change_key("unknown", "k", weight=1)
        with pytest.raises(NotFound):
            await client.reset_key("unknown", "k")
        with pytest.raises(InvalidRecord) as refused:
            await client.submit("media", key="k" * 201)
        assert refused.value.pointer == "/key"
    page = (await caller.get("/types/media/keys?limit=1")).body
    assert (
        await caller.get(
            f"/types/media/keys?limit=1&cursor={page['next'].replace('%', '%25').replace(' ', '%20').replace(chr(10), '%0A').replace('?', '%3F')}"
        )
    ).body["keys"][0]["key"] == "c"


async def test_the_command_line_sets_limits_and_concurrency_keys(penstock):
    """S5: the command line sets, pauses and resumes types and keys, and `none` removes a limit.
    Tasks are listed and operated on by their key."""
    for arguments, (field, value) in {
        ("types", "set", "media", "--max-in-flight", "5", "--fair"): ("max_in_flight", 5),
        ("types", "set", "media", "--starts-per-s", "2.5"): ("starts_per_s", 2.5),
        ("types", "set", "media", "--max-in-flight", "none"): ("max_in_flight", None),
        ("types", "pause", "media"): ("paused", True),
        ("types", "resume", "media"): ("paused", False),
        ("types", "keys", "set", "media", "acme", "--weight", "3", "--max-in-flight", "9"): ("weight", 3),
        ("types", "keys", "set", "media", "acme", "--max-in-flight", "none"): ("max_in_flight", None),
        ("types", "keys", "pause", "media", "acme"): ("paused", True),
        ("types", "keys", "resume", "media", "acme"): ("paused", False),
    }.items():
        [changed] = documents(await penstock(*arguments, "--json"))
        assert changed[field] == value, arguments
    [task_type] = documents(await penstock("types", "show", "media", "--json"))
    assert (task_type["first_stage"], task_type["fair"], task_type["starts_per_s"]) == ("probe", True, 2.5)
    listed = await penstock("types", "keys", "list", "media")
    assert "acme" in listed.stdout
    assert documents(await penstock("types", "keys", "reset", "media", "acme", "--json")) == [
        {"changed": True}
    ]
    assert "no concurrency key has settings" in (await penstock("types", "keys", "list", "media")).stdout
    [task] = documents(await penstock("submit", "media", "--key", "acme", "--json"))
    [shown] = documents(await penstock("get", str(task["id"]), "--json"))
    assert shown["key"] == "acme"
    await penstock("submit", "media", "--key", "other")
    assert [one["id"] for one in documents(await penstock("list", "--key", "acme", "--json"))] == [task["id"]]
    [paused] = documents(await penstock("tasks", "pause", "--key", "acme", "--yes", "--json"))
    assert (paused["count"], paused["found_in"]) == (1, {"ready": 1})
    [states] = documents(await penstock("list", "--key", "other", "--json"))
    assert states["state"] == "ready"
    assert (await penstock("types", "set", "media")).exit_code == 2
    assert (await penstock("types", "keys", "set", "media", "acme")).exit_code == 2
