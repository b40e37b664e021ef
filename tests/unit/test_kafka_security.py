"""Settings of TLS and SASL that contradict each other, and tokens: without any server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.discovery import Addresses
from penstock.errors import SettingsError
from penstock.kafka import tokens
from penstock.kafka.tokens import ClientCredentials, TokenRefusedError, TokenUnavailableError
from penstock.settings import Kafka

SCRAM = {"kafka_protocol": "SASL_SSL", "kafka_mechanism": "SCRAM-SHA-512", "kafka_user": "u"}
TOKENS = {
    "kafka_protocol": "SASL_SSL",
    "kafka_mechanism": "OAUTHBEARER",
    "kafka_client_id": "c",
    "kafka_token_url": "https://issuer.example/token",
    "kafka_client_secret_file": __file__,
}
NOTHING = "/there/is/no/such/file"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kafka_protocol": "TLS"}, "kafka_protocol='TLS' must be one of PLAINTEXT, SSL"),
        ({"kafka_protocol": "SASL_SSL"}, "kafka_protocol=SASL_SSL needs kafka_mechanism, one of PLAIN"),
        ({"kafka_protocol": "SASL_SSL", "kafka_mechanism": "GSSAPI"}, "not 'GSSAPI'"),
        (SCRAM, "kafka_mechanism=SCRAM-SHA-512 needs either kafka_password_file or kafka_password"),
        ({**SCRAM, "kafka_password": "p", "kafka_password_file": __file__}, "needs either"),
        (
            {**SCRAM, "kafka_password": "p", "kafka_user": None},
            "kafka_mechanism=SCRAM-SHA-512 needs kafka_user",
        ),
        (
            {**SCRAM, "kafka_password": "p", "kafka_client_id": "c"},
            "kafka_client_id is set, but kafka_mechanism",
        ),
        ({**SCRAM, "kafka_password_file": NOTHING}, f"kafka_password_file={NOTHING}: there is no such file"),
        ({"kafka_user": "u"}, "kafka_user is set, but kafka_protocol=PLAINTEXT never uses it"),
        ({"kafka_ca_file": __file__}, "kafka_ca_file is set, but kafka_protocol=PLAINTEXT never uses it"),
        (
            {"kafka_protocol": "SSL", "kafka_ca_file": NOTHING},
            f"kafka_ca_file={NOTHING}: there is no such file",
        ),
        (
            {"kafka_protocol": "SSL", "kafka_cert_file": __file__},
            "kafka_cert_file and kafka_key_file must be set",
        ),
        (
            {"kafka_protocol": "SSL", "kafka_mechanism": "PLAIN"},
            "kafka_mechanism is set, but kafka_protocol=SSL",
        ),
        ({**TOKENS, "kafka_token_url": "http://issuer.example/token"}, "must begin with https://"),
        ({**TOKENS, "kafka_client_secret_file": None}, "OAUTHBEARER needs kafka_client_secret_file"),
        ({**TOKENS, "kafka_user": "u"}, "kafka_user is set, but kafka_mechanism=OAUTHBEARER never uses it"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    """D5: each bad combination is refused at the start with the settings at fault, and never with a secret."""
    with pytest.raises(SettingsError) as refused:
        Kafka.load({}, **given)
    assert told in str(refused.value)


@pytest.mark.parametrize("given", [{}, {"kafka_protocol": "SSL"}, {**SCRAM, "kafka_password": "p"}, TOKENS])
def test_what_makes_sense_is_taken(given: dict[str, str]) -> None:
    """D5: the system's authorities do when none is named; a token address on this machine may be plain."""
    Kafka.load({}, **given)
    Kafka.load({}, **{**TOKENS, "kafka_token_url": "http://127.0.0.1:1/token"})


def test_a_password_is_in_no_repr() -> None:
    """D5: settings may be logged."""
    settings = Kafka.load({"PENSTOCK_KAFKA_PASSWORD": "hush-hush"}, **SCRAM)
    assert settings.kafka_password == "hush-hush"
    assert "hush-hush" not in repr(settings)


def test_a_local_deployment_is_reached_without_the_credentials_of_another_cluster() -> None:
    """D5: what the environment holds for a cluster elsewhere is not sent to the embedded broker, nor in its way."""
    local = Addresses(
        pid=1,
        gateway="http://127.0.0.1:1",
        kafka="127.0.0.1:9",
        postgres="",
        prefix="p.",
        objects="",
        embedded_kafka=True,
    )
    elsewhere = {
        f"PENSTOCK_{name.upper()}": value for name, value in {**SCRAM, "kafka_password": "p"}.items()
    }
    assert Kafka.load({**elsewhere, **local.environment()}).kafka_protocol == "PLAINTEXT"


@pytest.fixture
async def issuer() -> Any:
    """An issuer whose next answer a test sets, and what it was asked."""
    told: dict[str, Any] = {"status": 200, "body": {"access_token": "t1", "expires_in": 100}, "asked": 0}

    async def answer(_request: web.Request) -> web.Response:
        told["asked"] += 1
        if told["status"] == 302:
            return web.Response(status=302, headers={"Location": told["url"]})
        return web.json_response(told["body"], status=told["status"])

    app = web.Application()
    app.router.add_post("/token", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    told["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    yield told
    await runner.cleanup()


@pytest.fixture
def credentials(issuer: dict[str, Any], tmp_path: Path) -> tuple[ClientCredentials, list[float]]:
    """A client of that issuer, and its clock."""
    clock = [0.0]
    (tmp_path / "secret").write_text("s3cret\n")
    changed = {"kafka_token_url": issuer["url"], "kafka_client_secret_file": str(tmp_path / "secret")}
    settings = Kafka.load({}, **{**TOKENS, **changed})
    return ClientCredentials(settings, clock=lambda: clock[0]), clock


async def test_a_token_is_kept_for_most_of_its_life(
    issuer: dict[str, Any], credentials: tuple[ClientCredentials, list[float]]
) -> None:
    """D5: connections share a token; the next is fetched before the broker would refuse the old one."""
    provider, clock = credentials
    assert await provider.token() == "t1"
    clock[0] = 100 * tokens.RENEW_AT - 1
    issuer["body"] = {"access_token": "t2", "expires_in": 100}
    assert (await provider.token(), issuer["asked"]) == ("t1", 1)
    clock[0] += 1
    assert (await provider.token(), issuer["asked"]) == ("t2", 2)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": "invalid_client"}, TokenRefusedError),
        (400, {"error": "invalid_scope", "error_description": "no such scope"}, TokenRefusedError),
        (500, {}, TokenUnavailableError),
        (302, {}, TokenUnavailableError),
        (200, {}, TokenUnavailableError),
        (200, [], TokenUnavailableError),
    ],
)
async def test_an_issuer_without_a_token_is_told_and_not_hammered(
    issuer: dict[str, Any],
    credentials: tuple[ClientCredentials, list[float]],
    status: int,
    body: Any,
    kind: type[Exception],
) -> None:
    """D5: refused or away, the reason is told, without the secret; connections that fail ask once a second at most."""
    provider, clock = credentials
    issuer.update(status=status, body=body)
    for _ in range(3):
        with pytest.raises(kind) as told:
            await provider.token()
        assert "PENSTOCK_KAFKA_CLIENT_ID" in str(told.value) or kind is TokenUnavailableError
        assert "s3cret" not in str(told.value)
    assert issuer["asked"] == 1
    clock[0] = tokens.AGAIN_S
    issuer.update(status=200, body={"access_token": "t", "expires_in": 100})
    assert await provider.token() == "t"
