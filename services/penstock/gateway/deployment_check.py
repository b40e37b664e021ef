"""Refuses requests that are for another deployment.

A client in the directory of a deployment names it in a header. Without the check it would use
whichever gateway listens on the port of its own, which ended meanwhile.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.discovery import DEPLOYMENT_HEADER
from penstock.errors import OtherDeployment


class DeploymentCheck:
    """The deployment of a gateway.

    Args:
        deployment: id of its database.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises `OtherDeployment` for a request that names another deployment."""
        named = request.headers.get(DEPLOYMENT_HEADER)
        if named is not None and named != self._deployment:
            raise OtherDeployment(
                f"this gateway belongs to the deployment {self._deployment}, and the request is for {named[:100]}: "
                "start the deployment of your directory again, or name this gateway from another directory"
            )
        return await handler(request)

    async def add_header(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Names the deployment in an answer; for `Application.on_response_prepare`."""
        response.headers[DEPLOYMENT_HEADER] = self._deployment
