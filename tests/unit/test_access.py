"""Roles, namespaces and keys: the decisions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.access import (
    ALLOWED,
    ANYBODY,
    DEFAULT_NAMESPACE,
    Action,
    Grant,
    Key,
    Role,
    digest_of,
    namespace_of,
    namespaces_in,
    recognised,
    roles_in,
    token_of,
)
from penstock.core.allowance import SAVED_S, Allowance
from penstock.errors import CannotStart, SettingsError
from penstock.gateway.rules import require_rules
from penstock.gateway.settings import GatewaySettings
from penstock.http.tokens import bearer

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
    """O5: up to the first --, and `default` without."""
    assert namespace_of(name) == namespace


@given(st.from_regex(r"[A-Za-z0-9_-]{1,60}", fullmatch=True))
def test_every_type_is_in_one_namespace_and_seen_by_its_keys_alone(name):
    """O5: whatever a type is called, a key of one namespace sees it just when that is its own."""
    found = namespace_of(name)
    assert Grant("", frozenset(), frozenset({found})).covers(name)
    assert not Grant("", frozenset(), frozenset({found + "x"})).covers(name)
    assert Grant("", frozenset(), None).covers(name)
    assert not Grant("", frozenset(), frozenset()).covers(name)


@pytest.mark.parametrize("wrong", [[], ["*", "acme"], ["a--b"], ["-a"], ["a-"], ["a.b"], [""], ["x" * 51]])
def test_what_is_no_namespace_is_refused(wrong):
    """O5: a key for a namespace that no type can be in would look like one that works."""
    with pytest.raises(ValueError, match="namespace"):
        namespaces_in(wrong)


def test_roles_are_the_least_set():
    """O5: no role may do what another of the same actions may; only admins configure, and only workers and admins work."""
    assert len(set(ALLOWED.values())) == len(Role)
    assert [role for role in Role if Action.CONFIGURE in ALLOWED[role]] == [Role.ADMIN]
    assert [role for role in Role if Action.WORK in ALLOWED[role]] == [Role.WORKER, Role.ADMIN]
    assert all(ANYBODY.allows(action) for action in Action)


def test_a_key_is_recognised_by_its_secret_until_it_expires():
    """O5: only the whole secret of the very key, and not at the moment it expires or later."""
    grant = Grant("key:" + ID, frozenset({Role.READER}), None)
    keys = {ID: Key(ID, digest_of("s_e-c"), grant, NOW + timedelta(seconds=1))}
    good = token_of(ID, "s_e-c")
    assert recognised(keys, good, NOW) is keys[ID]
    assert recognised(keys, good, NOW + timedelta(seconds=1)) is None
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
        assert recognised(keys, wrong, NOW) is None, wrong


def test_names_of_roles_elsewhere_are_translated_and_others_give_nothing():
    """O5: what the mapping does not name is no role, although it may be called like one of ours."""
    assert roles_in(["ops", "admin"], {"ops": "operator"}) == {Role.OPERATOR}
    assert roles_in(["reader", "nobody"], {}) == {Role.READER}


@given(st.floats(0.5, 1000), st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_an_allowance_is_kept_over_any_time(rate, pauses):
    """O5: whenever requests come, no more than the rate and what was saved get through; who waits as told gets through."""
    now = taken = 0.0
    allowance = Allowance(rate, now)
    for pause in pauses:
        now += pause
        wait_s = allowance.take(now)
        if not wait_s:
            taken += 1
        assert taken <= rate * now + max(1.0, rate * SAVED_S) + 1e-6
        if wait_s:
            now += wait_s + 1e-9
            assert allowance.take(now) < 1e-6
            taken += 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_beyond_loopback_it_starts_only_with_authentication(host):
    """O5: the refusal names both settings and what to do."""
    with pytest.raises(SettingsError, match=r"PENSTOCK_GATEWAY_AUTH=keys.*penstock keys create"):
        GatewaySettings.load({}, gateway_host=host)
    assert GatewaySettings.load({}, gateway_host=host, gateway_auth="keys").auth_kinds == {"keys"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gateway_auth": "none"}, "gateway_auth"),
        ({"gateway_auth": "off,keys"}, "gateway_auth"),
        ({"gateway_auth": "oidc"}, "PENSTOCK_OIDC_ISSUER"),
        ({"gateway_auth": "oidc", "oidc_issuer": "http://idp.example", "oidc_audience": "a"}, "https"),
        ({"oidc_roles": ("ops=boss",)}, "oidc_roles"),
        ({"gateway_key_rate": -1.0}, "gateway_key_rate"),
        ({"gateway_audit_days": 0}, "gateway_audit_days"),
    ],
)
def test_settings_of_access_that_make_no_sense_are_refused(given, named):
    """Habit 7, O5: at start-up, and by name."""
    with pytest.raises(SettingsError, match=named):
        GatewaySettings.load({}, **given)


def test_loopback_needs_no_authentication():
    """O5: by any of its names."""
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert not GatewaySettings.load({}, gateway_host=host).auth_kinds


def test_a_client_sends_its_key_and_quotes_it_nowhere():
    """O5: what cannot be a key is refused before it is sent, and the error does not show it."""
    assert bearer(None) == bearer("") == {}
    assert bearer(" pk_a_b-c\n") == {"Authorization": "Bearer pk_a_b-c"}
    with pytest.raises(SettingsError, match="PENSTOCK_API_KEY") as error:
        bearer("secret\r\nX-Evil: 1")
    assert "secret" not in str(error.value)


def test_a_gateway_with_a_route_without_a_rule_does_not_start():
    """O5: whoever adds a route says who may ask it, or nobody is let in at all; each rule is of a form that the router has."""

    async def handler(_request: web.Request) -> web.Response:
        raise AssertionError

    app = web.Application()
    app.router.add_get("/tasks/{id:[0-9]+}", handler)
    require_rules(app.router.routes())
    app.router.add_post("/tasks/{id:[0-9]+}/secrets", handler)
    with pytest.raises(CannotStart, match=r"POST /tasks/\{id\}/secrets"):
        require_rules(app.router.routes())
