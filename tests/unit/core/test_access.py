"""Roles, namespaces and API keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.access import (
    ALLOWED,
    DEFAULT_NAMESPACE,
    UNRESTRICTED,
    Action,
    ApiKey,
    Grant,
    Role,
    digest_of,
    find_valid_key,
    map_roles,
    namespace_of,
    parse_namespaces,
    token_of,
)
from penstock.errors import CannotStart, SettingsError
from penstock.gateway.rules import require_rules
from penstock.gateway.settings import GatewaySettings
from penstock.http.credentials import bearer

NOW = datetime(2026, 11, 21, tzinfo=UTC)
ID = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("media", DEFAULT_NAMESPACE),
        ("media-small", DEFAULT_NAMESPACE),
        ("acme--media", "acme"),
        ("acme--media--small", "acme"),
        ("acme---media", "acme"),
        ("a-b--c", "a-b"),
        ("--media", DEFAULT_NAMESPACE),
    ],
)
def test_the_namespace_of_a_type_is_in_its_name(name, namespace):
    """O5: the namespace is the part before the first --, and `default` without one."""
    assert namespace_of(name) == namespace


@given(st.from_regex(r"[A-Za-z0-9_-]{1,60}", fullmatch=True))
def test_only_grants_of_its_namespace_cover_a_type(name):
    """O5: a key of one namespace covers a type exactly when the type is in that namespace."""
    namespace = namespace_of(name)
    assert Grant("", frozenset(), frozenset({namespace})).covers(name)
    assert not Grant("", frozenset(), frozenset({namespace + "x"})).covers(name)
    assert Grant("", frozenset(), None).covers(name)
    assert not Grant("", frozenset(), frozenset()).covers(name)


@pytest.mark.parametrize("wrong", [[], ["*", "acme"], ["a--b"], ["-a"], ["a-"], ["a.b"], [""], ["x" * 51]])
def test_an_invalid_namespace_is_refused(wrong):
    """O5: an API key for a namespace that cannot exist would look valid and permit nothing."""
    with pytest.raises(ValueError, match="namespace"):
        parse_namespaces(wrong)


def test_roles_differ_in_their_actions():
    """O5: no two roles permit the same actions, and no role has more than it needs."""
    assert len(set(ALLOWED.values())) == len(Role)
    assert [role for role in Role if Action.CONFIGURE in ALLOWED[role]] == [Role.ADMIN]
    assert [role for role in Role if Action.WORK in ALLOWED[role]] == [Role.WORKER, Role.ADMIN]
    assert all(UNRESTRICTED.allows(action) for action in Action)


def test_a_key_is_recognised_by_its_secret_until_it_expires():
    """O5: the token has the id and the whole secret of the key, and the key has not expired."""
    grant = Grant("key:" + ID, frozenset({Role.READER}), None)
    keys = {ID: ApiKey(ID, digest_of("s_e-c"), grant, NOW + timedelta(seconds=1))}
    good = token_of(ID, "s_e-c")
    assert find_valid_key(keys, good, NOW) is keys[ID]
    assert find_valid_key(keys, good, NOW + timedelta(seconds=1)) is None
    for wrong in (
        good + "x",
        good[:-1],
        token_of(ID, ""),
        token_of("f" * 16, "s_e-c"),
        "pk_" + ID,
        "pk_",
        "",
        "s_e-c",
        good.upper(),
        good + "\udcff",
        f"pk_{ID}_{digest_of('s_e-c').hex()}",
    ):
        assert find_valid_key(keys, wrong, NOW) is None, wrong


def test_role_names_of_a_provider_are_translated():
    """O5: with a mapping, a name that it lacks gives no role, even when a role has that name."""
    assert map_roles(["ops", "admin"], {"ops": "operator"}) == {Role.OPERATOR}
    assert map_roles(["reader", "nobody"], {}) == {Role.READER}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_beyond_loopback_it_starts_only_with_authentication(host):
    """O5: the error names both settings and the remedy."""
    with pytest.raises(SettingsError, match=r"PENSTOCK_GATEWAY_AUTH=keys.*penstock keys create"):
        GatewaySettings.load({}, gateway_host=host)
    assert GatewaySettings.load({}, gateway_host=host, gateway_auth="keys").auth_kinds == {"keys"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gateway_auth": "none"}, "PENSTOCK_GATEWAY_AUTH"),
        ({"gateway_auth": "off,keys"}, "PENSTOCK_GATEWAY_AUTH"),
        ({"gateway_auth": "oidc"}, "PENSTOCK_OIDC_ISSUER"),
        ({"gateway_auth": "oidc", "oidc_issuer": "http://idp.example", "oidc_audience": "a"}, "https"),
        ({"oidc_roles": ("ops=boss",)}, "PENSTOCK_OIDC_ROLES"),
        ({"gateway_key_rate": -1.0}, "PENSTOCK_GATEWAY_KEY_RATE"),
        ({"gateway_audit_days": 0}, "PENSTOCK_GATEWAY_AUDIT_DAYS"),
    ],
)
def test_invalid_settings_of_authentication_are_refused(given, named):
    """O5: at start-up, with the name of the setting."""
    with pytest.raises(SettingsError, match=named):
        GatewaySettings.load({}, **given)


def test_loopback_needs_no_authentication():
    """O5: every name of the loopback address counts."""
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert not GatewaySettings.load({}, gateway_host=host).auth_kinds


def test_a_client_never_quotes_its_token():
    """O5: an invalid token is refused before it is sent, and the error does not quote it."""
    assert bearer(None) == bearer("") == {}
    assert bearer(" pk_a_b-c\n") == {"Authorization": "Bearer pk_a_b-c"}
    with pytest.raises(SettingsError, match="PENSTOCK_API_KEY") as error:
        bearer("secret\r\nX-Evil: 1")
    assert "secret" not in str(error.value)


def test_a_gateway_with_a_route_without_a_rule_does_not_start():
    """O5: a new route without a rule prevents the start, so that it is never open by mistake."""

    async def handler(_request: web.Request) -> web.Response:
        raise AssertionError

    app = web.Application()
    app.router.add_get("/tasks/{id:[0-9]+}", handler)
    require_rules(app.router.routes())
    app.router.add_post("/tasks/{id:[0-9]+}/secrets", handler)
    with pytest.raises(CannotStart, match=r"POST /tasks/\{id\}/secrets"):
        require_rules(app.router.routes())
