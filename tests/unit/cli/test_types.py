"""`penstock types add` and `set`: which settings they change."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.cli.types import types

# A type whose settings differ from the defaults.
MEDIA = {"name": "media", "first_stage": "probe", "partitions": 4, "max_per_key": 3, "lease_ms": 5_000}


class Gateway:
    """A gateway that has one type; keeps the requests that change it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []

    async def answer(
        self, method: str, path: str, body: bytes | None = None, **_options: Any
    ) -> dict[str, Any]:
        if method == "GET":
            return {"types": [MEDIA]}
        settings = json.loads(body or b"{}")
        self.requests.append((method, path, settings))
        return {**(MEDIA if method == "PATCH" else {"first_stage": "start"}), **settings}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    found = Gateway()
    monkeypatch.setattr(
        "penstock.client.Client._request",
        lambda _client, *request, **options: found.answer(*request, **options),
    )
    return found


def penstock(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--gateway", "http://127.0.0.1:1"])


def test_adding_a_type_again_keeps_its_other_settings(gateway: Gateway) -> None:
    """T2: it reset the first stage, and dropped the limit of a key, without a word."""
    again = penstock("types", "add", "media", "--partitions", "4")
    assert gateway.requests == []
    assert again.stdout == "type media existed already, nothing changed; tasks begin at stage probe\n"
    longer = penstock("types", "add", "media", "--lease-ms", "6000", "--max-per-key", "3")
    assert gateway.requests == [("PATCH", "/types/media", {"lease_ms": 6_000, "max_per_key": 3})]
    assert longer.stdout == "type media existed already, changed: lease_ms; tasks begin at stage probe\n"


def test_a_new_type_is_registered(gateway: Gateway) -> None:
    """T2: settings that are not given get their defaults, from the gateway."""
    outcome = penstock("types", "add", "report", "--lease-ms", "5m")
    assert gateway.requests == [("POST", "/types", {"name": "report", "lease_ms": 300_000})]
    assert outcome.stdout == "type report: tasks begin at stage start\n"


def test_only_add_has_defaults() -> None:
    """T2: `types set` leaves what is not given as it is, so its help names no defaults."""
    assert "Default: 300000." in " ".join(penstock("types", "add", "--help").stdout.split())
    options = [each for each in types.commands["set"].params if isinstance(each, click.Option)]
    assert {each.opts[0] for each in options if "Default" in (each.help or "")} == {"--gateway", "--data-dir"}
