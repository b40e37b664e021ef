"""Settings of TLS and SASL, and tokens, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.discovery import Addresses
from penstock.errors import SettingsError
from penstock.kafka.client import tokens
from penstock.kafka.client.tokens import ClientCredentials, TokenRefusedError, TokenUnavailableError
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
    ("given", "expected"),
    [
        ({"kafka_protocol": "TLS"}, "PENSTOCK_KAFKA_PROTOCOL='TLS' must be one of PLAINTEXT, SSL"),
        (
            {"kafka_protocol": "SASL_SSL"},
            "PENSTOCK_KAFKA_PROTOCOL=SASL_SSL needs PENSTOCK_KAFKA_MECHANISM, one of PLAIN",
        ),
        ({"kafka_protocol": "SASL_SSL", "kafka_mechanism": "GSSAPI"}, "not 'GSSAPI'"),
        (
            SCRAM,
            "PENSTOCK_KAFKA_MECHANISM=SCRAM-SHA-512 needs either PENSTOCK_KAFKA_PASSWORD_FILE or PENSTOCK_KAFKA_PASSWORD",
        ),
        ({**SCRAM, "kafka_password": "p", "kafka_password_file": __file__}, "needs either"),
        (
            {**SCRAM, "kafka_password": "p", "kafka_user": None},
            "PENSTOCK_KAFKA_MECHANISM=SCRAM-SHA-512 needs PENSTOCK_KAFKA_USER",
        ),
        (
            {**SCRAM, "kafka_password": "p", "kafka_client_id": "c"},
            "PENSTOCK_KAFKA_CLIENT_ID is set, but PENSTOCK_KAFKA_MECHANISM",
        ),
        (
            {**SCRAM, "kafka_password_file": NOTHING},
            f"PENSTOCK_KAFKA_PASSWORD_FILE={NOTHING}: this file does not exist",
        ),
        (
            {"kafka_user": "u"},
            "PENSTOCK_KAFKA_USER is set, but PENSTOCK_KAFKA_PROTOCOL=PLAINTEXT never uses it",
        ),
        (
            {"kafka_ca_file": __file__},
            "PENSTOCK_KAFKA_CA_FILE is set, but PENSTOCK_KAFKA_PROTOCOL=PLAINTEXT never uses it",
        ),
        (
            {"kafka_protocol": "SSL", "kafka_ca_file": NOTHING},
            f"PENSTOCK_KAFKA_CA_FILE={NOTHING}: this file does not exist",
        ),
        (
            {"kafka_protocol": "SSL", "kafka_cert_file": __file__},
            "PENSTOCK_KAFKA_CERT_FILE and PENSTOCK_KAFKA_KEY_FILE must be set",
        ),
        (
            {"kafka_protocol": "SSL", "kafka_mechanism": "PLAIN"},
            "PENSTOCK_KAFKA_MECHANISM is set, but PENSTOCK_KAFKA_PROTOCOL=SSL",
        ),
        ({**TOKENS, "kafka_token_url": "http://issuer.example/token"}, "must begin with https://"),
        ({**TOKENS, "kafka_client_secret_file": None}, "OAUTHBEARER needs PENSTOCK_KAFKA_CLIENT_SECRET_FILE"),
        (
            {**TOKENS, "kafka_user": "u"},
            "PENSTOCK_KAFKA_USER is set, but PENSTOCK_KAFKA_MECHANISM=OAUTHBEARER never uses it",
        ),
    ],
)
def test_contradicting_settings_are_refused_by_name(given: dict[str, Any], expected: str) -> None:
    """O5: each contradiction is refused at the start; the error names the settings, and no
    secret."""
    with pytest.raises(SettingsError) as refused:
        Kafka.load({}, **given)
    assert expected in str(refused.value)


@pytest.mark.parametrize("given", [{}, {"kafka_protocol": "SSL"}, {**SCRAM, "kafka_password": "p"}, TOKENS])
def test_valid_settings_are_accepted(given: dict[str, str]) -> None:
    """O5: without a CA file the system's authorities count; a token URL on localhost may be
    HTTP."""
    Kafka.load({}, **given)
    Kafka.load({}, **{**TOKENS, "kafka_token_url": "http://127.0.0.1:1/token"})


def test_a_password_is_in_no_repr() -> None:
    """O5: settings may be logged."""
    settings = Kafka.load({"PENSTOCK_KAFKA_PASSWORD": "hush-hush"}, **SCRAM)
    assert settings.kafka_password == "hush-hush"
    assert "hush-hush" not in repr(settings)


def test_a_local_deployment_is_reached_without_the_credentials_of_another_cluster() -> None:
    """O5: credentials of another cluster in the environment do not reach the embedded broker."""
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
    """An issuer: its next answer, which a test may change, and the number of its requests."""
    state: dict[str, Any] = {"status": 200, "body": {"access_token": "t1", "expires_in": 100}, "asked": 0}

    async def answer(_request: web.Request) -> web.Response:
        state["asked"] += 1
        if state["status"] == 302:
            return web.Response(status=302, headers={"Location": state["url"]})
        return web.json_response(state["body"], status=state["status"])

    app = web.Application()
    app.router.add_post("/token", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    yield state
    await runner.cleanup()


@pytest.fixture
def credentials(issuer: dict[str, Any], tmp_path: Path) -> tuple[ClientCredentials, list[float]]:
    """A client of the issuer, and the client's clock."""
    clock = [0.0]
    (tmp_path / "secret").write_text("s3cret\n")
    changed = {"kafka_token_url": issuer["url"], "kafka_client_secret_file": str(tmp_path / "secret")}
    settings = Kafka.load({}, **{**TOKENS, **changed})
    return ClientCredentials(settings, clock=lambda: clock[0]), clock


async def test_a_token_is_cached_for_most_of_its_life(
    issuer: dict[str, Any], credentials: tuple[ClientCredentials, list[float]]
) -> None:
    """O5: connections share a token; the next one is fetched before the old one expires."""
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
async def test_a_failing_issuer_is_reported_and_called_rarely(
    issuer: dict[str, Any],
    credentials: tuple[ClientCredentials, list[float]],
    status: int,
    body: Any,
    kind: type[Exception],
) -> None:
    """O5: the error has the reason and no secret; failed connections ask at most once a second."""
    provider, clock = credentials
    issuer.update(status=status, body=body)
    for _ in range(3):
        with pytest.raises(kind) as refused:
            await provider.token()
        assert "PENSTOCK_KAFKA_CLIENT_ID" in str(refused.value) or kind is TokenUnavailableError
        assert "s3cret" not in str(refused.value)
    assert issuer["asked"] == 1
    clock[0] = tokens.RETRY_S
    issuer.update(status=200, body={"access_token": "t", "expires_in": 100})
    assert await provider.token() == "t"


async def test_a_secret_that_cannot_be_read_is_named(
    issuer: dict[str, Any], credentials: tuple[ClientCredentials, list[float]], tmp_path: Path
) -> None:
    """O5: without its secret the client sends no request, and the error names the file."""
    (tmp_path / "secret").unlink()
    with pytest.raises(tokens.TokenUnavailableError, match=r"PENSTOCK_KAFKA_CLIENT_SECRET_FILE.*secret"):
        await credentials[0].token()
    assert issuer["asked"] == 0
