"""Who may ask what: one rule for each route. A gateway with a route that has none does not start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from penstock.core.access import Action
from penstock.errors import CannotStart


@dataclass(frozen=True, slots=True)
class Rule:
    """What it takes to ask a route.

    Attributes:
        action: that a role must allow; None is open to everybody: probes, and pages without anything of the deployment.
    """

    action: Action | None


_OPEN = Rule(None)
_READ = Rule(Action.READ)
_OPERATE = Rule(Action.OPERATE)

RULES: Mapping[str, Rule] = {
    "POST /tasks": Rule(Action.SUBMIT),
    "GET /tasks": _READ,
    "POST /tasks/states": _READ,
    "POST /tasks/cancel": _OPERATE,
    "GET /tasks/{id}": _READ,
    "GET /tasks/{id}/why": _READ,
    "POST /tasks/{id}/cancel": _OPERATE,
    "GET /backlog": _READ,
    "GET /owners": _READ,
    "GET /types": _READ,
    "GET /types/{name}": _READ,
    "POST /types": Rule(Action.CONFIGURE),
    # Pausing and limiting; all else of a type takes `configure` (`gateway.types`).
    "PATCH /types/{name}": _OPERATE,
    "GET /types/{name}/keys": _READ,
    "POST /types/{name}/keys": _OPERATE,
    "POST /types/{name}/keys/reset": _OPERATE,
    "GET /targets": _READ,
    "POST /targets/disable": _OPERATE,
    "POST /targets/enable": _OPERATE,
    "POST /targets/limit": _OPERATE,
    "GET /callbacks": _READ,
    "POST /callbacks/replay": _OPERATE,
    "POST /operations": _OPERATE,
    "GET /operations": _READ,
    "GET /operations/{id}": _READ,
    "POST /operations/{id}/stop": _OPERATE,
    "POST /hold_task": Rule(Action.WORK),
    "POST /set_task": Rule(Action.WORK),
    "GET /": _OPEN,
    "GET /docs": _OPEN,
    "GET /openapi.json": _OPEN,
    "GET /healthz": _OPEN,
    "GET /livez": _OPEN,
    "GET /readyz": _OPEN,
}


def route_of(request: web.Request) -> str | None:
    """Method and pattern of the route that a request was led to; None when there is none."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    # What answers GET may answer HEAD.
    method = "GET" if request.method == "HEAD" else request.method
    return f"{method} {resource.canonical}"


def require_rules(routes: Iterable[web.AbstractRoute]) -> None:
    """Does nothing when each route has a rule.

    Raises:
        CannotStart: one has none; without it nobody could say who may ask it.
    """
    for route in routes:
        assert route.resource is not None
        name = f"{'GET' if route.method == 'HEAD' else route.method} {route.resource.canonical}"
        if name not in RULES:
            raise CannotStart(f"no rule says who may ask {name}: see penstock.gateway.rules")
