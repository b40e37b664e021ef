"""Counts connections, and responses by route and status, and measures the time of responses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock import metrics
from penstock.http.connection_guard import BOUNDS, END_REASONS, ConnectionCounts
from penstock.metrics import Sample
from penstock.metrics.histogram import Histogram

# The status of a request whose client disconnected before the response, as nginx has it.
CLIENT_CLOSED_REQUEST = 499


class RequestMetrics:
    """Connections and responses since the start of the process.

    Attributes:
        connections: counted by the listener (`penstock.http.listener.listen`).
    """

    def __init__(self) -> None:
        self.connections = ConnectionCounts()
        self._responses: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def middleware(self) -> Middleware:
        """The outermost middleware, so that it sees the final status."""

        @web.middleware
        async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
            began_s = time.monotonic()
            status = CLIENT_CLOSED_REQUEST
            try:
                response = await handler(request)
                status = response.status
            except web.HTTPException as error:
                status = error.status
                raise
            finally:
                self._count(request, status, time.monotonic() - began_s)
            return response

        return counting

    def _count(self, request: web.Request, status: int, elapsed_s: float) -> None:
        resource = request.match_info.route.resource
        # Clients choose unknown paths and methods: each would add a label value.
        route = "none" if resource is None else resource.canonical
        method = "other" if resource is None else request.method
        self._responses[method, route, status] += 1
        seconds = self._seconds.get((method, route))
        if seconds is None:
            seconds = self._seconds[method, route] = Histogram(metrics.REQUEST_SECONDS)
        seconds.observe(elapsed_s)

    def samples(self) -> Iterator[Sample]:
        """Its metrics (`penstock.metrics`)."""
        yield Sample(metrics.CONNECTIONS, self.connections.open)
        for bound in BOUNDS:
            yield Sample(metrics.CONNECTIONS_REFUSED, self.connections.refused[bound], (bound,))
        for reason in END_REASONS:
            yield Sample(metrics.CONNECTIONS_ENDED, self.connections.ended[reason], (reason,))
        for (method, route, status), responses in self._responses.items():
            yield Sample(metrics.REQUESTS, responses, (method, route, str(status)))
        for labels, seconds in self._seconds.items():
            yield seconds.sample(*labels)
