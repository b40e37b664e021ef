"""Authorization rules: the action of each route. A route without a rule prevents the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from penstock.core.access import Action
from penstock.errors import CannotStart


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirements of a route.

    Attributes:
        action: the action that a role must permit; None for an open route: probes, and pages
            without data of the deployment.
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
    # Pausing and limiting; changes of other settings need `configure` (`gateway.types`).
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
    """Method and pattern of the route of a request; None without a route."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    # A route for GET may also answer HEAD.
    method = "GET" if request.method == "HEAD" else request.method
    return f"{method} {resource.canonical}"


def require_rules(routes: Iterable[web.AbstractRoute]) -> None:
    """Checks that each route has a rule.

    Raises:
        CannotStart: a route has no rule, so that it would be open or closed by accident.
    """
    for route in routes:
        assert route.resource is not None
        name = f"{'GET' if route.method == 'HEAD' else route.method} {route.resource.canonical}"
        if name not in RULES:
            raise CannotStart(f"the route {name} has no rule: add one to penstock.gateway.rules")
