"""Counting what is answered, by route and status."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock import metrics
from penstock.metrics import Sample
from penstock.metrics.histogram import Histogram

# What a client that has gone would have been answered.
CLIENT_GONE = 499


class Requests:
    """What was answered until now."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def middleware(self) -> Middleware:
        """The outermost: it sees what every other has made of an answer."""

        @web.middleware
        async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
            began_s = time.monotonic()
            status = CLIENT_GONE
            try:
                answer = await handler(request)
                status = answer.status
            except web.HTTPException as error:
                status = error.status
                raise
            finally:
                self._count(request, status, time.monotonic() - began_s)
            return answer

        return counting

    def _count(self, request: web.Request, status: int, took_s: float) -> None:
        resource = request.match_info.route.resource
        # Neither paths nor methods that nobody has defined: there would be as many as a stranger likes.
        route = "none" if resource is None else resource.canonical
        method = "other" if resource is None else request.method
        self._answers[method, route, status] += 1
        seconds = self._seconds.get((method, route))
        if seconds is None:
            seconds = self._seconds[method, route] = Histogram(metrics.REQUEST_SECONDS)
        seconds.see(took_s)

    def samples(self) -> Iterator[Sample]:
        """What is to be told of it (`penstock.metrics`)."""
        for (method, route, status), answers in self._answers.items():
            yield Sample(metrics.REQUESTS, answers, (method, route, str(status)))
        for labels, seconds in self._seconds.items():
            yield seconds.sample(*labels)
