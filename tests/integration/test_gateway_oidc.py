"""Bearer tokens, by an issuer of this test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import orjson
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.access import make_key, sent
from tests.gateways import running_gateway
from tests.waiting import wait_until

from penstock.core.access import Role
from penstock.gateway import oidc
from penstock.gateway.oidc import ByToken, ProviderUnavailable
from penstock.gateway.settings import GatewaySettings


class Issuer:
    """Publishes keys, and signs with them."""

    def __init__(self) -> None:
        self.url = ""
        self.asked = 0
        self.away = False
        self.calls_itself: str | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.keys: dict[str, Any] = {}

    def add(self, name: str, key: Any) -> None:
        self.keys[name] = key

    async def configuration(self, _request: web.Request) -> web.Response:
        self.asked += 1
        await self.answers.wait()
        if self.away:
            raise web.HTTPServiceUnavailable
        return web.json_response({"issuer": self.calls_itself or self.url, "jwks_uri": f"{self.url}/jwks"})

    async def jwks(self, request: web.Request) -> web.StreamResponse:
        found = []
        for name, key in self.keys.items():
            rsa_key = isinstance(key, rsa.RSAPrivateKey)
            algorithm = jwt.algorithms.RSAAlgorithm if rsa_key else jwt.algorithms.ECAlgorithm
            public = orjson.loads(algorithm.to_jwk(key.public_key()))
            found.append({**public, "kid": name, "use": "sig", "alg": "RS256" if rsa_key else "ES256"})
        # What we do not understand must not keep us from what we do.
        body = orjson.dumps(
            {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "shared"}, {"kty": "?"}, *found]}
        )
        response = web.StreamResponse()
        await response.prepare(request)
        # In pieces that come one after the other, as large documents do.
        for piece in (body[:100], body[100:]):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response

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
        whole = {key: value for key, value in body.items() if value is not None}
        return jwt.encode(whole, signed_by or self.keys[name], algorithm=algorithm, headers={"kid": name})


@asynccontextmanager
async def an_issuer() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    issuer.add("one", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    app = web.Application()
    app.add_routes(
        [web.get("/.well-known/openid-configuration", issuer.configuration), web.get("/jwks", issuer.jwks)]
    )
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


async def test_a_token_gives_what_its_claims_say_and_no_more() -> None:
    """O5: the roles that the mapping names, the namespaces of the claim; what is missing or makes no sense gives nothing."""
    async with an_issuer() as issuer, ByToken(GatewaySettings.load({}, **settings(issuer))) as tokens:
        grant = await tokens.recognise(issuer.token())
        assert grant is not None
        assert (grant.actor, grant.roles, grant.namespaces) == ("oidc:ann", {Role.OPERATOR}, {"acme"})
        everywhere = await tokens.recognise(issuer.token(penstock_namespaces="*"))
        assert everywhere is not None
        assert everywhere.namespaces is None
        for wrong in (None, "", ["a b", "*"], "* acme", 7):
            nowhere = await tokens.recognise(issuer.token(penstock_namespaces=wrong))
            assert nowhere is not None
            assert nowhere.namespaces == frozenset(), wrong
        odd = await tokens.recognise(issuer.token(sub="a\0\ud800"))
        assert odd is not None
        assert odd.actor == "oidc:a??"
        for roles in (None, {}, {"penstock": ["admin"]}, {"penstock": 3}, "penstock"):
            nobody = await tokens.recognise(issuer.token(roles=roles))
            assert nobody is not None
            assert nobody.roles == frozenset(), roles


async def test_what_is_no_token_of_the_issuer_for_us_is_refused() -> None:
    """O5: another signature, issuer, audience or time, no end or subject, an unsigned token, a symmetric one signed with the public
    key, and text that is none: all are nothing."""
    async with an_issuer() as issuer, ByToken(GatewaySettings.load({}, **settings(issuer))) as tokens:
        now = int(time.time())
        stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        good = issuer.token()
        assert await tokens.recognise(good) is not None
        head, body, signature = good.split(".")
        for wrong in (
            issuer.token(signed_by=stranger),
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
            assert await tokens.recognise(wrong) is None, wrong


async def test_keys_are_rotated_and_a_flood_of_unknown_ones_asks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O5: a token that names a new key makes the keys be read again, at most every so often; one whose key is gone from
    them is refused, also when it was found good before; without a provider no token holds after a while."""
    async with an_issuer() as issuer, ByToken(GatewaySettings.load({}, **settings(issuer))) as tokens:
        old = issuer.token()
        assert await tokens.recognise(old) is not None
        for number in range(20):
            assert await tokens.recognise(issuer.token(f"k{number}", signed_by=issuer.keys["one"])) is None
        assert issuer.asked == 1
        monkeypatch.setattr(oidc, "AGAIN_S", 0.0)
        issuer.keys = {"two": ec.generate_private_key(ec.SECP256R1())}
        new = issuer.token("two", algorithm="ES256")
        assert await tokens.recognise(new) is not None
        assert await tokens.recognise(old) is None
        issuer.away = True
        monkeypatch.setattr(oidc, "KEYS_S", 0.0)
        assert await tokens.recognise(new) is not None
        monkeypatch.setattr(oidc, "TRUST_S", 0.0)
        with pytest.raises(ProviderUnavailable):
            await tokens.recognise(new)


async def test_all_who_come_while_the_keys_are_read_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: the provider is asked once for a crowd, at the start and when a key is new, and nobody of it is refused for having come
    while it was being asked; while the keys that are known do, nobody waits for them."""
    async with an_issuer() as issuer, ByToken(GatewaySettings.load({}, **settings(issuer))) as tokens:

        async def crowd(*names: str) -> list[Any]:
            """Recognises a token of each name, all of them while the provider thinks."""
            before = issuer.asked
            issuer.answers.clear()
            made = [
                issuer.token(name, sub=f"{name}{number}", algorithm="RS256")
                for number, name in enumerate(names)
            ]
            first = asyncio.ensure_future(tokens.recognise(made[0]))
            await wait_until(lambda: issuer.asked > before)
            others = [asyncio.ensure_future(tokens.recognise(token)) for token in made[1:]]
            # Each of them gets as far as it can without an answer.
            for _ in range(5):
                await asyncio.sleep(0)
            ready = [task.done() for task in others]
            issuer.answers.set()
            found = await asyncio.gather(first, *others)
            assert issuer.asked == before + 1
            return [[grant and grant.actor for grant in found], ready]

        told, _ = await crowd(*["one"] * 8)
        assert told == [f"oidc:one{number}" for number in range(8)]
        issuer.add("new", rsa.generate_private_key(public_exponent=65537, key_size=2048))
        # As if the last reading were a while ago.
        monkeypatch.setattr(tokens, "_tried_s", float("-inf"))
        told, ready = await crowd("new", "new", "one", "new")
        assert told == ["oidc:new0", "oidc:new1", "oidc:one2", "oidc:new3"]
        assert ready == [False, True, False]


async def test_a_provider_that_calls_itself_otherwise_is_not_believed() -> None:
    """O5: its keys could be anybody's."""
    async with an_issuer() as issuer, ByToken(GatewaySettings.load({}, **settings(issuer))) as tokens:
        issuer.calls_itself = "https://elsewhere.example"
        with pytest.raises(ProviderUnavailable):
            await tokens.recognise(issuer.token())


async def test_the_gateway_takes_tokens_beside_keys(kafka_servers, prefix, database, tmp_path) -> None:
    """O5: by one header, each by its form; what a token may is judged like a key's, and the audit names its subject."""
    async with (
        an_issuer() as issuer,
        running_gateway(
            kafka=kafka_servers,
            prefix=prefix,
            postgres=database,
            objects=f"file://{tmp_path}",
            **settings(issuer),
        ) as caller,
    ):
        _, key = await make_key(database, Role.ADMIN)

        async def registered() -> bool:
            answer = await caller.post("/types", {"name": "acme--a"}, headers=sent(key))
            return bool(answer.status in (200, 201))

        await wait_until(registered)
        assert (await caller.post("/types", {"name": "beta--a"}, headers=sent(key))).status == 201
        token = sent(issuer.token())
        assert [one["name"] for one in (await caller.get("/types", headers=token)).body["types"]] == [
            "acme--a"
        ]
        assert (await caller.post("/types", {"name": "acme--b"}, headers=token)).status == 403
        asked = {"verb": "pause", "by": "x", "filter": {"type": "acme--a"}}
        assert (await caller.post("/operations", asked, headers=token)).body["actor"] == "oidc:ann"
        assert (await caller.get("/types", headers=sent(issuer.token(aud="shop")))).status == 401
