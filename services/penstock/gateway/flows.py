"""The route that starts flows."""

from __future__ import annotations

import dataclasses
from typing import Any

import asyncpg
from aiohttp import web

from penstock import tracing
from penstock.contracts.flow_submission import FLOW_SCHEMA, FlowSubmission
from penstock.core.access import Grant, namespace_of
from penstock.errors import Invalid
from penstock.gateway.access import grant_of
from penstock.gateway.batcher import SubmissionBatcher
from penstock.gateway.entries import (
    EntryKind,
    Outcome,
    admitted,
    answer,
    one_or_all,
    read_entry,
    settle,
    with_base,
)
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.objects import ObjectStore
from penstock.postgres import flow_starts
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.flow_starts import FlowStart, Started
from penstock.postgres.flow_submissions import start_of

_ENTRIES = EntryKind(noun="flow", member="flows", stored_field="inputs", path="/flows/")


class FlowStartRoutes:
    """The route that starts flows.

    Args:
        settings: limits.
        pool: the database.
        objects: stores inputs above the inline limit.
        definitions: the definitions.
        limiter: limits submissions while PostgreSQL is behind.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        definitions: DefinitionCache,
        limiter: SubmissionLimiter,
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._definitions = definitions
        self._limiter = limiter
        self._batcher: SubmissionBatcher[FlowStart, Started] = SubmissionBatcher(
            pool, settings.gateway_submit_wait_s, flow_starts.start
        )

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.post("/flows", self.submit)]

    async def submit(self, request: web.Request) -> web.Response:
        """POST /flows: an object is one flow; an array is a batch of independent flows."""
        async with admitted(request, self._limiter) as (raw, rows):
            parent = request.headers.get(tracing.TRACEPARENT)
            with tracing.span("submit", parent, kind="server", root=True, flows=rows) as span:
                traceparent = span.traceparent if span else None
                return await answer(
                    raw,
                    _ENTRIES,
                    self._settings.gateway_batch_limit,
                    lambda entries: self._settle(entries, grant_of(request), traceparent),
                )

    async def _settle(
        self, entries: list[tuple[str, Any]], grant: Grant, traceparent: str | None
    ) -> list[Outcome]:
        return await settle(
            entries, await self._read(entries, grant, traceparent), self._store, self._batcher.submit
        )

    async def _read(
        self, entries: list[tuple[str, Any]], grant: Grant, traceparent: str | None
    ) -> list[FlowStart | Invalid]:
        """The start of each entry, or its faults, whose pointers begin with its place."""
        submissions = [read_entry(base, raw, FlowSubmission.from_wire, FLOW_SCHEMA) for base, raw in entries]
        reached = await self._definitions.reach(
            (each.flow, each.version)
            for each in submissions
            if isinstance(each, FlowSubmission) and grant.covers(each.flow)
        )
        outcomes: list[FlowStart | Invalid] = []
        for (base, _), submission in zip(entries, submissions, strict=True):
            if isinstance(submission, Invalid):
                outcomes.append(submission)
                continue
            start, faults = start_of(submission, reached)
            outcomes.append(
                one_or_all([with_base(base, fault) for fault in faults])
                if start is None
                else dataclasses.replace(start, traceparent=traceparent)
            )
        return outcomes

    async def _store(self, start: FlowStart) -> FlowStart:
        # Before the row, so that each reference in PostgreSQL has its object.
        inputs = await self._objects.check_in(start.inputs, namespace_of(start.name))
        return start if inputs is start.inputs else dataclasses.replace(start, inputs=inputs)
