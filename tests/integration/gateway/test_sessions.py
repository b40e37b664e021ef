"""Sign-in to the console: sessions by API key and by a provider, and what protects them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import asyncpg
import jwt
import pytest
from aiohttp import web
from tests.integration.gateway.test_oidc import Issuer, running_issuer
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller, running_gateway
from tests.support.waiting import wait_until

from penstock.core.access import Role
from penstock.gateway.sessions import COOKIE, CSRF_HEADER
from penstock.postgres import api_keys


@pytest.fixture
async def caller(kafka_servers, prefix, database, tmp_path):
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        yield caller


class Browser:
    """Sends what a browser sends from a page of a gateway.

    Attributes:
        cookie: the header with its cookies; empty without one.
        csrf: the session's token.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.cookie = ""
        self.csrf = ""

    async def call(self, method: str, path: str, json: Any = None, **headers: str) -> Any:
        """Calls the gateway; a header of the argument replaces one of the browser."""
        own = {"Origin": self._caller.url, "Sec-Fetch-Site": "same-origin", "Cookie": self.cookie}
        own[CSRF_HEADER] = self.csrf
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent_headers = {name: value for name, value in {**own, **given}.items() if value}
        more = {} if json is None else {"json": json}
        return await self._caller._call(method, path, headers=sent_headers, **more)

    async def sign_in(self, token: str) -> Any:
        """Signs in by an API key."""

        async def has_answered() -> Any:
            answer = await self.call("POST", "/session", {"api_key": token})
            return answer if answer.status == 200 else None

        answer = await wait_until(has_answered)
        self.take(answer)
        self.csrf = answer.body["csrf"]
        return answer

    def take(self, answer: Any) -> None:
        """Keeps the session's cookie."""
        for line in answer.headers.getall("Set-Cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            if name == COOKIE:
                self.cookie = f"{name}={value}"


async def test_an_api_key_is_exchanged_once_for_a_cookie(caller, database):
    """The session has the rights of its key, and the audit its name; the database has no token."""
    key_id, token = await make_key(database, Role.OPERATOR, ["acme"])
    browser = Browser(caller)
    before = await browser.call("GET", "/session")
    assert (before.body["signed_in"], before.body["methods"], before.body["actions"]) == (False, ["keys"], [])
    answer = await browser.sign_in(token)
    [line] = answer.headers.getall("Set-Cookie")
    for part in ("HttpOnly", "Secure", "SameSite=Strict", "Path=/"):
        assert part in line
    assert "Domain" not in line
    assert token not in line
    session = (await browser.call("GET", "/session")).body
    assert session["actor"] == f"key:{key_id}"
    assert (session["namespaces"], session["actions"]) == (["acme"], ["read", "submit", "operate"])
    assert (await browser.call("GET", "/tasks")).status == 200
    assert (await browser.call("POST", "/types", {"name": "acme--t"})).status == 403
    connection = await asyncpg.connect(database)
    [row] = await connection.fetch("SELECT * FROM penstock.console_session")
    await connection.close()
    assert (row["key_id"], row["actor"]) == (key_id, f"key:{key_id}")
    assert browser.cookie.partition("=")[2].encode() not in bytes(row["digest"])


async def test_a_wrong_key_begins_no_session(caller):
    answer = await Browser(caller).call("POST", "/session", {"api_key": "pk_0123456789abcdef_wrong"})
    assert (answer.status, "Set-Cookie" in answer.headers) == (401, False)


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param({"Origin": ""}, id="no origin"),
        pytest.param({"Origin": "https://evil.example"}, id="another origin"),
        pytest.param({"Origin": "null"}, id="the origin of a sandbox"),
        pytest.param({CSRF_HEADER: ""}, id="no token"),
        pytest.param({CSRF_HEADER: "0" * 64}, id="another token"),
        pytest.param({"Sec-Fetch-Site": "cross-site"}, id="a browser says so"),
        pytest.param({"Sec-Fetch-Site": "same-site"}, id="a page of another port"),
    ],
)
async def test_another_site_changes_nothing(caller, database, forged):
    """A cookie alone permits no change (cross-site request forgery)."""
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.ADMIN))[1])
    headers = {name.replace("-", "_"): value for name, value in forged.items()}
    assert (await browser.call("POST", "/types", {"name": "t"}, **headers)).status == 403
    assert (await browser.call("DELETE", "/session", **headers)).status == 403
    assert (await browser.call("POST", "/types", {"name": "t"})).status == 201


async def test_another_site_reads_nothing(caller, database):
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.READER))[1])
    for path in ("/tasks", "/session"):
        assert (await browser.call("GET", path, Sec_Fetch_Site="cross-site")).status == 403


async def test_a_bearer_token_needs_no_cookie_and_is_not_widened_by_one(caller, database):
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.ADMIN))[1])
    _, reader = await make_key(database, Role.READER)

    async def is_accepted() -> bool:
        return (await caller.get("/tasks", headers=sent(reader))).status == 200

    await wait_until(is_accepted)
    answer = await browser.call("POST", "/types", {"name": "t"}, **sent(reader))
    assert answer.status == 403
    assert (await browser.call("GET", "/tasks", Authorization="Bearer nonsense")).status == 401


async def test_a_sign_in_never_takes_over_a_session(caller, database):
    """A cookie from before the sign-in is worth nothing afterwards (session fixation)."""
    _, token = await make_key(database, Role.READER)
    browser = Browser(caller)
    await browser.sign_in(token)
    first = browser.cookie
    await browser.sign_in(token)
    assert browser.cookie != first
    assert (await browser.call("GET", "/tasks", Cookie=first)).status == 401


async def test_a_session_ends_with_its_key_and_by_sign_out(caller, database):
    key_id, token = await make_key(database, Role.READER)
    browser, other = Browser(caller), Browser(caller)
    await browser.sign_in(token)
    await other.sign_in(token)
    out = await browser.call("DELETE", "/session")
    assert (out.status, out.body["signed_in"]) == (200, False)
    assert (await browser.call("GET", "/tasks")).status == 401
    assert (await other.call("GET", "/tasks")).status == 200
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    await api_keys.revoke(connection, key_id)
    await connection.close()

    async def is_refused() -> bool:
        return (await other.call("GET", "/tasks")).status == 401

    await wait_until(is_refused)
    assert (await other.call("GET", "/session")).body["signed_in"] is False


@pytest.mark.parametrize(
    "older",
    ["created_at = now() - interval '24 hours 1 second'", "used_at = now() - interval '8 hours 1 second'"],
)
async def test_a_session_ends_after_8_hours_without_use_and_after_24_hours(caller, database, older):
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.READER))[1])
    connection = await asyncpg.connect(database)
    await connection.execute(f"UPDATE penstock.console_session SET {older}")
    await connection.close()

    async def is_refused() -> bool:
        return (await browser.call("GET", "/tasks")).status == 401

    await wait_until(is_refused)


async def test_a_session_serves_at_every_gateway(caller, database, kafka_servers, prefix, tmp_path):
    """Also after a restart. A sign-out at one gateway ends it at the other."""
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.READER))[1])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as second:
        there = Browser(second)
        there.cookie, there.csrf = browser.cookie, browser.csrf
        assert (await there.call("GET", "/tasks")).status == 200
        await browser.call("DELETE", "/session")

        async def is_refused() -> bool:
            return (await there.call("GET", "/tasks")).status == 401

        await wait_until(is_refused)


async def test_sign_ins_of_one_address_are_limited(caller):
    browser = Browser(caller)
    answers = [await browser.call("POST", "/session", {"api_key": "pk_x"}) for _ in range(80)]
    assert answers[-1].status == 429
    assert int(answers[-1].headers["Retry-After"]) >= 1


async def test_without_authentication_the_console_opens_at_once(kafka_servers, prefix, database, tmp_path):
    async with running_gateway(
        kafka=kafka_servers, prefix=prefix, postgres=database, objects=f"file://{tmp_path}"
    ) as caller:
        session = (await caller.get("/session")).body
        assert (session["authentication"], session["namespaces"]) == ("off", None)
        assert session["actions"] == ["read", "submit", "work", "operate", "configure"]


async def test_a_key_makes_none_with_more_rights(caller, database):
    """Neither another namespace, nor a longer life, nor a higher rate, and not by rotation."""
    soon = datetime.now(UTC) + timedelta(hours=1)
    key_id, token = await make_key(database, Role.ADMIN, ["acme"], expires_at=soon, rate=50.0)
    browser = Browser(caller)
    await browser.sign_in(token)
    wanted = {"name": "n", "role": "admin", "namespaces": ["acme"], "expires_in_s": 60, "rate": 5}
    for wider in (
        {"namespaces": ["acme", "beta"]},
        {"namespaces": None},
        {"expires_in_s": 7200},
        {"rate": 500},
    ):
        assert (await browser.call("POST", "/keys", wanted | wider)).status == 403, wider
    unbounded = {name: wanted[name] for name in ("name", "role", "namespaces", "rate")}
    assert (await browser.call("POST", "/keys", unbounded)).status == 403
    made = await browser.call("POST", "/keys", wanted)
    assert made.status == 201
    assert made.body["secret"].startswith(f"pk_{made.body['id']}_")
    found = (await browser.call("GET", "/keys")).body["keys"]
    assert {row["id"] for row in found} == {key_id, made.body["id"]}
    assert all("secret" not in row for row in found)
    turned = await browser.call("POST", f"/keys/{made.body['id']}/rotate", {"expires_in_s": 7200})
    assert turned.status == 403
    turned = await browser.call("POST", f"/keys/{made.body['id']}/rotate", {})
    assert (turned.status, turned.body["role"], turned.body["rate"]) == (201, "admin", 5)


async def test_cookies_without_a_session_are_limited(caller, database):
    """Each costs a query without any credentials. A session in use goes on beside them."""
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.READER))[1])
    assert (await browser.call("GET", "/tasks")).status == 200
    answers = [await browser.call("GET", "/tasks", Cookie=f"{COOKIE}={number:043d}") for number in range(400)]
    assert {answer.status for answer in answers} == {401, 429}
    assert (await browser.call("GET", "/tasks")).status == 200


async def test_a_sign_out_is_not_undone_by_a_read_that_began_before(caller, database):
    browser = Browser(caller)
    await browser.sign_in((await make_key(database, Role.READER))[1])

    async def read() -> int:
        return int((await browser.call("GET", "/tasks")).status)

    reads = [asyncio.ensure_future(read()) for _ in range(20)]
    await browser.call("DELETE", "/session")
    await asyncio.gather(*reads)
    assert await read() == 401


class Provider(Issuer):
    """A provider with sign-in: its page says yes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[str, Any] = {}
        self.asked: dict[str, str] = {}
        self.form: dict[str, Any] = {}

    async def configuration(self, request: web.Request) -> web.Response:
        """The configuration, with the endpoints of sign-in."""
        await super().configuration(request)
        document = {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"}
        ends = {name: f"{self.url}/{name}" for name in ("authorization_endpoint", "token_endpoint")}
        return web.json_response(document | ends)

    async def exchange(self, request: web.Request) -> web.Response:
        """The id token for a code."""
        self.form = dict(await request.post())
        if self.form["code"] != "code":
            raise web.HTTPBadRequest
        claims = {"aud": "console", "nonce": self.asked["nonce"], **self.claims}
        return web.json_response({"id_token": self.token(**claims), "access_token": "other"})


@asynccontextmanager
async def signing_in(
    kafka: str, prefix: str, dsn: str, tmp_path: Any
) -> AsyncIterator[tuple[Provider, Caller]]:
    """A provider, and a gateway that trusts it."""
    async with (
        running_issuer(Provider) as provider,
        running_gateway(
            kafka=kafka,
            prefix=prefix,
            postgres=dsn,
            objects=f"file://{tmp_path}",
            gateway_auth="keys,oidc",
            oidc_issuer=provider.url,
            oidc_audience="penstock",
            oidc_client_id="console",
            oidc_client_secret="client secret",
            oidc_role_claim="roles.penstock",
            oidc_roles=("ops=operator",),
        ) as caller,
    ):
        yield provider, caller


async def begin(provider: Provider, caller: Caller, return_to: str = "/console/tasks?state=failed") -> str:
    """Begins a sign-in; returns the cookie that the browser keeps."""
    async with caller.session.get(
        f"{caller.url}/session/oidc", params={"return": return_to}, allow_redirects=False
    ) as answer:
        assert answer.status == 302
        url = urlsplit(answer.headers["Location"])
        provider.asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        line = answer.headers["Set-Cookie"]
    assert "SameSite=Lax" in line
    assert "HttpOnly" in line
    return line.partition(";")[0]


async def finish(caller: Caller, cookie: str, **query: str) -> aiohttp.ClientResponse:
    """The provider leads the browser back."""
    return await caller.session.get(
        f"{caller.url}/session/oidc/callback",
        params=query,
        headers={"Cookie": cookie},
        allow_redirects=False,
    )


async def test_sign_in_by_a_provider(kafka_servers, prefix, database, tmp_path):
    async with signing_in(kafka_servers, prefix, database, tmp_path) as (provider, caller):
        cookie = await begin(provider, caller)
        assert provider.asked["redirect_uri"] == f"{caller.url}/session/oidc/callback"
        assert (provider.asked["code_challenge_method"], provider.asked["client_id"]) == ("S256", "console")
        answer = await finish(caller, cookie, code="code", state=provider.asked["state"])
        assert (answer.status, answer.headers["Location"]) == (302, "/console/tasks?state=failed")
        assert provider.form["client_secret"] == "client secret"
        digest = hashlib.sha256(provider.form["code_verifier"].encode()).digest()
        assert jwt.utils.base64url_encode(digest).decode() == provider.asked["code_challenge"]
        browser = Browser(caller)
        browser.take(answer)
        session = (await browser.call("GET", "/session")).body
        assert (session["actor"], session["roles"], session["namespaces"]) == (
            "oidc:ann",
            ["operator"],
            ["acme"],
        )
        assert (await browser.call("GET", "/tasks")).status == 200
    # A gateway that no longer trusts the provider ends its sessions.
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as later:
        there = Browser(later)
        there.cookie = browser.cookie
        assert (await there.call("GET", "/tasks")).status == 401


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"state": "other"}, id="another state"),
        pytest.param({"cookie": "__Host-penstock-sign-in=eyJ4Ijox"}, id="another browser"),
        pytest.param({"code": "stolen"}, id="another code"),
        pytest.param({"claims": {"nonce": "other"}}, id="another nonce"),
        pytest.param({"claims": {"aud": "penstock"}}, id="a token for another client"),
        pytest.param({"claims": {"exp": 1}}, id="an old token"),
        pytest.param({"claims": {"roles": {}}}, id="no role"),
        pytest.param({"error": "access_denied"}, id="refused by the provider"),
    ],
)
async def test_a_sign_in_that_does_not_fit_begins_no_session(
    kafka_servers, prefix, database, tmp_path, changed
):
    async with signing_in(kafka_servers, prefix, database, tmp_path) as (provider, caller):
        cookie = await begin(provider, caller)
        provider.claims = changed.get("claims", {})
        query = {"code": "code", "state": provider.asked["state"]}
        query |= {name: value for name, value in changed.items() if name in ("state", "code", "error")}
        answer = await finish(caller, changed.get("cookie", cookie), **query)
        assert answer.status == 302
        assert "sign_in_error=" in answer.headers["Location"]
        cookies = answer.headers.getall("Set-Cookie")
        assert not any(line.startswith(f"{COOKIE}=") for line in cookies)
        connection = await asyncpg.connect(database)
        assert await connection.fetchval("SELECT count(*) FROM penstock.console_session") == 0
        await connection.close()


@pytest.mark.parametrize(
    "path", ["https://evil.example/", "//evil.example", "/console//evil", "/console/\\evil", "/tasks", ""]
)
async def test_a_sign_in_returns_to_the_console_only(kafka_servers, prefix, database, tmp_path, path):
    async with signing_in(kafka_servers, prefix, database, tmp_path) as (provider, caller):
        cookie = await begin(provider, caller, path)
        answer = await finish(caller, cookie, code="code", state=provider.asked["state"])
        assert answer.headers["Location"] == "/console/"
