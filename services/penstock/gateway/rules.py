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
        action: the action that a role must permit; None for an open route: probes, pages without
            data of the deployment, and public keys.
    """

    action: Action | None


_OPEN = Rule(None)
_READ = Rule(Action.READ)
_OPERATE = Rule(Action.OPERATE)

RULES: Mapping[str, Rule] = {
    "POST /tasks": Rule(Action.SUBMIT),
    "GET /tasks": _READ,
    "POST /tasks/states": _READ,
    "POST /tasks/ended": _READ,
    "POST /tasks/progress": _READ,
    "POST /tasks/cancel": _OPERATE,
    "GET /tasks/{id}": _READ,
    "GET /tasks/{id}/why": _READ,
    "GET /tasks/{id}/logs": _READ,
    "GET /tasks/{id}/logs/{step}/{attempt}": _READ,
    "DELETE /tasks/{id}/logs": _OPERATE,
    "POST /logs": Rule(Action.WORK),
    "POST /tasks/{id}/cancel": _OPERATE,
    "GET /backlog": _READ,
    "GET /owners": _READ,
    "GET /workers": _READ,
    "GET /types": _READ,
    "GET /types/{name}": _READ,
    "POST /types": Rule(Action.CONFIGURE),
    # Pausing and limiting; changes of other settings need `configure` (`gateway.types`).
    "PATCH /types/{name}": _OPERATE,
    "POST /flow-definitions": Rule(Action.CONFIGURE),
    "GET /flow-definitions": _READ,
    "GET /flow-definitions/{name}": _READ,
    "GET /flow-definitions/{name}/versions/{version}": _READ,
    "POST /flows": Rule(Action.SUBMIT),
    "POST /events/{name}": Rule(Action.SUBMIT),
    "GET /types/{name}/keys": _READ,
    "POST /types/{name}/keys": _OPERATE,
    "POST /types/{name}/keys/reset": _OPERATE,
    "GET /targets": _READ,
    "POST /targets/disable": _OPERATE,
    "POST /targets/enable": _OPERATE,
    "POST /targets/limit": _OPERATE,
    "GET /targets/secrets": _READ,
    "POST /targets/secrets": Rule(Action.CONFIGURE),
    "POST /targets/secrets/reencrypt": Rule(Action.CONFIGURE),
    "POST /targets/secrets/{id}/rotate": Rule(Action.CONFIGURE),
    "DELETE /targets/secrets/{id}": Rule(Action.CONFIGURE),
    # Receivers of callbacks have no credentials, and the keys are public.
    "GET /targets/public-keys": _OPEN,
    "GET /callbacks": _READ,
    "POST /callbacks/replay": _OPERATE,
    "POST /operations": _OPERATE,
    "GET /operations": _READ,
    "GET /operations/{id}": _READ,
    "POST /operations/{id}/stop": _OPERATE,
    "GET /flows": _READ,
    "POST /flows/operations": _OPERATE,
    "GET /flows/{id}": _READ,
    "GET /flows/{id}/nodes/{node}": _READ,
    "GET /flows/{id}/why": _READ,
    "POST /flows/{id}/pause": _OPERATE,
    "POST /flows/{id}/resume": _OPERATE,
    "POST /flows/{id}/cancel": _OPERATE,
    "POST /flows/{id}/recover": _OPERATE,
    "POST /flows/{id}/rerun": _OPERATE,
    "PUT /schedules/{name}": Rule(Action.CONFIGURE),
    "GET /schedules": _READ,
    "GET /schedules/{name}": _READ,
    "DELETE /schedules/{name}": Rule(Action.CONFIGURE),
    "POST /schedules/{name}/pause": _OPERATE,
    "POST /schedules/{name}/resume": _OPERATE,
    "GET /schedules/{name}/ticks": _READ,
    "GET /schedules/{name}/skips": _READ,
    "POST /schedules/{name}/backfill": _OPERATE,
    "GET /backfills": _READ,
    "GET /backfills/{id}": _READ,
    "POST /backfills/{id}/stop": _OPERATE,
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
