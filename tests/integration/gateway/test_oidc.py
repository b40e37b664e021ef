"""Bearer tokens, from an issuer that these tests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import jwt
import orjson
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.support.api_keys import make_key, sent
from tests.support.gateways import running_gateway
from tests.support.waiting import wait_until

from penstock.core.access import Role
from penstock.gateway import oidc
from penstock.gateway.oidc import OidcAuthenticator, ProviderUnavailable
from penstock.gateway.settings import GatewaySettings


class Issuer:
    """An OIDC provider that publishes keys and signs tokens."""

    def __init__(self) -> None:
        self.url = ""
        self.request_count = 0
        self.is_down = False
        self.claimed_url: str | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.keys: dict[str, Any] = {}

    def add(self, name: str, private_key: Any) -> None:
        self.keys[name] = private_key

    async def configuration(self, _request: web.Request) -> web.Response:
        self.request_count += 1
        await self.may_answer.wait()
        if self.is_down:
            raise web.HTTPServiceUnavailable
        return web.json_response({"issuer": self.claimed_url or self.url, "jwks_uri": f"{self.url}/jwks"})

    async def jwks(self, request: web.Request) -> web.StreamResponse:
        found = []
        for name, private_key in self.keys.items():
            rsa_key = isinstance(private_key, rsa.RSAPrivateKey)
            algorithm = jwt.algorithms.RSAAlgorithm if rsa_key else jwt.algorithms.ECAlgorithm
            public = orjson.loads(algorithm.to_jwk(private_key.public_key()))
            found.append({**public, "kid": name, "use": "sig", "alg": "RS256" if rsa_key else "ES256"})
        # A key of an unsupported type must not make the supported keys unusable.
        body = orjson.dumps(
            {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "shared"}, {"kty": "?"}, *found]}
        )
        response = web.StreamResponse()
        await response.prepare(request)
        # A large document arrives in pieces.
        for piece in (body[:100], body[100:]):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response

    async def exchange(self, _request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    def token(
        self, name: str = "one", *, signed_by: Any = None, algorithm: str = "RS256", **claims: Any
    ) -> str:
        now = int(time.time())
        body = {
            "iss": self.url,
            "aud": "penstock",
            "sub": "ann",
            "exp": now + 600,
            "roles": {"penstock": ["ops", "else"]},
            "penstock_namespaces": ["acme"],
            **claims,
        }
        whole = {claim: value for claim, value in body.items() if value is not None}
        return jwt.encode(whole, signed_by or self.keys[name], algorithm=algorithm, headers={"kid": name})


IssuerT = TypeVar("IssuerT", bound=Issuer)


@asynccontextmanager
async def running_issuer(kind: type[IssuerT] = Issuer) -> AsyncIterator[IssuerT]:  # type: ignore[assignment]
    issuer = kind()
    issuer.add("one", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    app = web.Application()
    app.add_routes(
        [web.get("/.well-known/openid-configuration", issuer.configuration), web.get("/jwks", issuer.jwks)]
    )
    app.add_routes([web.post("/token_endpoint", issuer.exchange)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()


def settings(issuer: Issuer) -> dict[str, Any]:
    return {
        "gateway_auth": "keys,oidc",
        "oidc_issuer": issuer.url,
        "oidc_audience": "penstock",
        "oidc_role_claim": "roles.penstock",
        "oidc_roles": ("ops=operator", "boss=admin"),
    }


async def test_a_token_grants_what_its_claims_say() -> None:
    """O5: a token grants the mapped roles and the namespaces of its claim. A missing or invalid
    claim grants nothing."""
    async with (
        running_issuer() as issuer,
        OidcAuthenticator(GatewaySettings.load({}, **settings(issuer))) as tokens,
    ):
        grant = await tokens.authenticate(issuer.token())
        assert grant is not None
        assert (grant.actor, grant.roles, grant.namespaces) == ("oidc:ann", {Role.OPERATOR}, {"acme"})
        unconfined = await tokens.authenticate(issuer.token(penstock_namespaces="*"))
        assert unconfined is not None
        assert unconfined.namespaces is None
        for wrong in (None, "", ["a b", "*"], "* acme", 7):
            without_namespaces = await tokens.authenticate(issuer.token(penstock_namespaces=wrong))
            assert without_namespaces is not None
            assert without_namespaces.namespaces == frozenset(), wrong
        unprintable = await tokens.authenticate(issuer.token(sub="a\0\ud800"))
        assert unprintable is not None
        assert unprintable.actor == "oidc:a??"
        for roles in (None, {}, {"penstock": ["admin"]}, {"penstock": 3}, "penstock"):
            without_roles = await tokens.authenticate(issuer.token(roles=roles))
            assert without_roles is not None
            assert without_roles.roles == frozenset(), roles


async def test_an_invalid_token_is_rejected() -> None:
    """O5: a token is rejected if its signature, issuer, audience or time is wrong, or its end or
    subject is missing. An unsigned token, a symmetric signature and malformed text are rejected
    too."""
    async with (
        running_issuer() as issuer,
        OidcAuthenticator(GatewaySettings.load({}, **settings(issuer))) as tokens,
    ):
        now = int(time.time())
        foreign_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        good = issuer.token()
        assert await tokens.authenticate(good) is not None
        head, body, signature = good.split(".")
        for wrong in (
            issuer.token(signed_by=foreign_key),
            issuer.token(iss="https://elsewhere.example"),
            issuer.token(aud="shop"),
            issuer.token(exp=now - 60),
            issuer.token(exp=None),
            issuer.token(sub=None),
            issuer.token(nbf=now + 120),
            jwt.encode(
                {"iss": issuer.url, "aud": "penstock", "sub": "ann", "exp": now + 60},
                "",
                algorithm="none",
                headers={"kid": "one"},
            ),
            issuer.token("shared", signed_by=b"secret" * 8, algorithm="HS256"),
            f"{head}.{body}.{signature[:-4]}AAAA",
            f"{head}.{body}.",
            "a.b.c",
        ):
            assert await tokens.authenticate(wrong) is None, wrong


async def test_unknown_keys_make_few_requests_to_the_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O5: a token with an unknown key makes the gateway read the keys again, at most once in an
    interval. A token with a removed key is rejected. Without the provider, tokens are accepted for
    a limited time."""
    async with (
        running_issuer() as issuer,
        OidcAuthenticator(GatewaySettings.load({}, **settings(issuer))) as tokens,
    ):
        old = issuer.token()
        assert await tokens.authenticate(old) is not None
        for number in range(20):
            assert await tokens.authenticate(issuer.token(f"k{number}", signed_by=issuer.keys["one"])) is None
        assert issuer.request_count == 1
        monkeypatch.setattr(oidc, "KEY_RETRY_S", 0.0)
        issuer.keys = {"two": ec.generate_private_key(ec.SECP256R1())}
        new = issuer.token("two", algorithm="ES256")
        assert await tokens.authenticate(new) is not None
        assert await tokens.authenticate(old) is None
        issuer.is_down = True
        monkeypatch.setattr(oidc, "KEY_REFRESH_S", 0.0)
        assert await tokens.authenticate(new) is not None
        monkeypatch.setattr(oidc, "KEY_TRUST_S", 0.0)
        with pytest.raises(ProviderUnavailable):
            await tokens.authenticate(new)


async def test_concurrent_requests_share_one_read_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: concurrent requests share one request to the provider, at the start and for a new key,
    and none is rejected meanwhile. A request with a cached key does not wait."""
    async with (
        running_issuer() as issuer,
        OidcAuthenticator(GatewaySettings.load({}, **settings(issuer))) as tokens,
    ):

        async def authenticate_together(*names: str) -> list[Any]:
            """Authenticates one token for each name, all of them before the provider answers."""
            before = issuer.request_count
            issuer.may_answer.clear()
            made = [
                issuer.token(name, sub=f"{name}{number}", algorithm="RS256")
                for number, name in enumerate(names)
            ]
            first = asyncio.ensure_future(tokens.authenticate(made[0]))
            await wait_until(lambda: issuer.request_count > before)
            later = [asyncio.ensure_future(tokens.authenticate(token)) for token in made[1:]]
            # Each task runs until it needs the provider's answer.
            for _ in range(5):
                await asyncio.sleep(0)
            ready = [task.done() for task in later]
            issuer.may_answer.set()
            found = await asyncio.gather(first, *later)
            assert issuer.request_count == before + 1
            return [[grant and grant.actor for grant in found], ready]

        actors, _ = await authenticate_together(*["one"] * 8)
        assert actors == [f"oidc:one{number}" for number in range(8)]
        issuer.add("new", rsa.generate_private_key(public_exponent=65537, key_size=2048))
        # The retry interval since the last request is over.
        monkeypatch.setattr(tokens, "_tried_s", float("-inf"))
        actors, ready = await authenticate_together("new", "new", "one", "new")
        assert actors == ["oidc:new0", "oidc:new1", "oidc:one2", "oidc:new3"]
        assert ready == [False, True, False]


async def test_a_provider_with_another_issuer_name_is_rejected() -> None:
    """O5: the gateway rejects the keys of a provider whose document names another issuer."""
    async with (
        running_issuer() as issuer,
        OidcAuthenticator(GatewaySettings.load({}, **settings(issuer))) as tokens,
    ):
        issuer.claimed_url = "https://elsewhere.example"
        with pytest.raises(ProviderUnavailable):
            await tokens.authenticate(issuer.token())


async def test_the_gateway_accepts_tokens_and_api_keys(where, database) -> None:
    """O5: one header carries API keys and tokens. The gateway checks a token's rights like those of
    a key, and the audit names its subject."""
    async with (
        running_issuer() as issuer,
        running_gateway(**where, **settings(issuer)) as caller,
    ):
        _, api_key = await make_key(database, Role.ADMIN)

        async def registered() -> bool:
            answer = await caller.post("/types", {"name": "acme--a"}, headers=sent(api_key))
            return bool(answer.status in (200, 201))

        await wait_until(registered)
        assert (await caller.post("/types", {"name": "beta--a"}, headers=sent(api_key))).status == 201
        token = sent(issuer.token())
        assert [one["name"] for one in (await caller.get("/types", headers=token)).body["types"]] == [
            "acme--a"
        ]
        assert (await caller.post("/types", {"name": "acme--b"}, headers=token)).status == 403
        body = {"verb": "pause", "by": "x", "filter": {"type": "acme--a"}}
        assert (await caller.post("/operations", body, headers=token)).body["actor"] == "oidc:ann"
        assert (await caller.get("/types", headers=sent(issuer.token(aud="shop")))).status == 401
