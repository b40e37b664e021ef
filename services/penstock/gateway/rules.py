"""Authorization rules: the action of each route. A route without a rule prevents the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from penstock.core.access import Action
from penstock.errors import CannotStart

# The action that a role must permit; None for an open route: probes, pages without data of the
# deployment, and public keys.
RULES: Mapping[str, Action | None] = {
    "POST /tasks": Action.SUBMIT,
    "GET /tasks": Action.READ,
    "POST /tasks/states": Action.READ,
    "POST /tasks/ended": Action.READ,
    "POST /tasks/progress": Action.READ,
    "POST /tasks/cancel": Action.OPERATE,
    "GET /tasks/{id}": Action.READ,
    "GET /tasks/{id}/why": Action.READ,
    "GET /tasks/{id}/logs": Action.READ,
    "GET /tasks/{id}/logs/{step}/{attempt}": Action.READ,
    "DELETE /tasks/{id}/logs": Action.OPERATE,
    "POST /logs": Action.WORK,
    "POST /tasks/{id}/cancel": Action.OPERATE,
    "POST /tasks/{id}/rerun": Action.OPERATE,
    "GET /backlog": Action.READ,
    "GET /owners": Action.READ,
    "GET /workers": Action.READ,
    "GET /types": Action.READ,
    "GET /types/{name}": Action.READ,
    "GET /types/{name}/durations": Action.READ,
    "POST /types": Action.CONFIGURE,
    # Pausing and limiting; changes of other settings need `configure` (`gateway.types`).
    "PATCH /types/{name}": Action.OPERATE,
    "POST /flow-definitions": Action.CONFIGURE,
    "GET /flow-definitions": Action.READ,
    "GET /flow-definitions/{name}": Action.READ,
    "GET /flow-definitions/{name}/versions/{version}": Action.READ,
    "POST /flows": Action.SUBMIT,
    "POST /events/{name}": Action.SUBMIT,
    "GET /types/{name}/keys": Action.READ,
    "POST /types/{name}/keys": Action.OPERATE,
    "POST /types/{name}/keys/reset": Action.OPERATE,
    "GET /targets": Action.READ,
    "POST /targets/disable": Action.OPERATE,
    "POST /targets/enable": Action.OPERATE,
    "POST /targets/limit": Action.OPERATE,
    "GET /targets/secrets": Action.READ,
    "POST /targets/secrets": Action.CONFIGURE,
    "POST /targets/secrets/reencrypt": Action.CONFIGURE,
    "POST /targets/secrets/{id}/rotate": Action.CONFIGURE,
    "DELETE /targets/secrets/{id}": Action.CONFIGURE,
    # Receivers of callbacks have no credentials, and the keys are public.
    "GET /targets/public-keys": None,
    "GET /callbacks": Action.READ,
    "POST /callbacks/replay": Action.OPERATE,
    "POST /operations": Action.OPERATE,
    "GET /operations": Action.READ,
    "GET /operations/{id}": Action.READ,
    "POST /operations/{id}/stop": Action.OPERATE,
    "GET /flows": Action.READ,
    "POST /flows/operations": Action.OPERATE,
    "GET /flows/{id}": Action.READ,
    "GET /flows/{id}/nodes/{node}": Action.READ,
    "GET /flows/{id}/why": Action.READ,
    "POST /flows/{id}/pause": Action.OPERATE,
    "POST /flows/{id}/resume": Action.OPERATE,
    "POST /flows/{id}/cancel": Action.OPERATE,
    "POST /flows/{id}/recover": Action.OPERATE,
    "POST /flows/{id}/rerun": Action.OPERATE,
    "PUT /schedules/{name}": Action.CONFIGURE,
    "GET /schedules": Action.READ,
    "GET /schedules/{name}": Action.READ,
    "DELETE /schedules/{name}": Action.CONFIGURE,
    "POST /schedules/{name}/pause": Action.OPERATE,
    "POST /schedules/{name}/resume": Action.OPERATE,
    "GET /schedules/{name}/ticks": Action.READ,
    "GET /schedules/{name}/skips": Action.READ,
    "GET /schedules/{name}/history": Action.READ,
    "POST /schedules/{name}/backfill": Action.OPERATE,
    "GET /backfills": Action.READ,
    "GET /backfills/{id}": Action.READ,
    "POST /backfills/{id}/stop": Action.OPERATE,
    "POST /hold_task": Action.WORK,
    "POST /set_task": Action.WORK,
    "GET /overview": Action.READ,
    "GET /live": Action.READ,
    "GET /keys": Action.CONFIGURE,
    "POST /keys": Action.CONFIGURE,
    "POST /keys/{id}/rotate": Action.CONFIGURE,
    "DELETE /keys/{id}": Action.CONFIGURE,
    "GET /audit": Action.CONFIGURE,
    # Sign-in authenticates by itself, and the console's files have no data.
    "GET /session": None,
    "POST /session": None,
    "DELETE /session": None,
    "GET /session/oidc": None,
    "GET /session/oidc/callback": None,
    "GET /console": None,
    "GET /console/{path}": None,
    "GET /": None,
    "GET /docs": None,
    "GET /openapi.json": None,
    "GET /healthz": None,
    "GET /livez": None,
    "GET /readyz": None,
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
