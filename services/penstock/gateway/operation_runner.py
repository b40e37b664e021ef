"""Runs the batches of operations: those that this gateway began, and those that another has left.

What this module guarantees: after a crash another gateway continues an operation. Operations wait
while PostgreSQL is unavailable. An error that PostgreSQL would repeat ends the operation, which
then has the error.
"""

from __future__ import annotations

import asyncio
import logging

import asyncpg
import orjson

from penstock.core.flow.operations import FlowFilter
from penstock.core.operations import Subject, TaskFilter
from penstock.errors import Conflict, Invalid, ObjectsUnavailable, PostgresUnavailable, ValueRefused
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.flow_reruns import Reruns
from penstock.gateway.operation_filters import flow_filter, task_filter
from penstock.gateway.settings import GatewaySettings
from penstock.postgres import flow_operations, operations
from penstock.postgres.flow_starts import FlowStart

log = logging.getLogger(__name__)

# How often a gateway looks for operations that another gateway has left.
ADOPT_INTERVAL_S = 10.0
RETRY_S = 1.0
# Longest sleep until the next batch of an operation.
MAX_DUE_SLEEP_S = 5.0


class OperationRunner:
    """The operations that this gateway runs.

    Args:
        settings: source of events.
        pool: the database.
        producer: publishes the outbox entries of cancellations.
        reruns: makes the starts of flows that repeat others.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: BackgroundProducer,
        reruns: Reruns,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._reruns = reruns
        # By id: when the next batch is due, on the loop's clock.
        self._due: dict[str, float] = {}
        self._filters: dict[str, TaskFilter | FlowFilter] = {}
        self._woken = asyncio.Event()

    def add(self, operation_id: str, filters: TaskFilter | FlowFilter) -> None:
        """Adds an operation, which is due at once."""
        self._filters[operation_id] = filters
        self._due[operation_id] = 0.0

    def wake(self) -> None:
        """Makes the loop look for operations that are due."""
        self._woken.set()

    async def run(self) -> None:
        """Runs the batches of all operations in turn, until cancelled."""
        loop = asyncio.get_running_loop()
        adopt_at = 0.0
        while True:
            self._woken.clear()
            try:
                if loop.time() >= adopt_at:
                    await self._adopt()
                    adopt_at = loop.time() + ADOPT_INTERVAL_S
                for operation_id, due in [*self._due.items()]:
                    if due <= loop.time():
                        await self.run_batch(operation_id)
            except PostgresUnavailable as error:
                # A batch is one transaction, so the row of the operation has its exact progress.
                log.warning(
                    "Operations are delayed; trying again",
                    extra={"event": "operations_delayed", "error": error},
                )
                await asyncio.sleep(RETRY_S)
                continue
            next_at = min([adopt_at, *self._due.values()])
            try:
                async with asyncio.timeout(max(0.0, next_at - loop.time())):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _adopt(self) -> None:
        while running_ids := await operations.running_ids(self._pool, [*self._due]):
            for operation_id in running_ids:
                row = await operations.get(self._pool, operation_id)
                assert row is not None
                log.info(
                    "Continuing an operation",
                    extra={"event": "operation_adopted", "operation": operation_id, "verb": row["verb"]},
                )
                read = flow_filter if row["subject"] == Subject.FLOW else task_filter
                self._filters[operation_id] = read(orjson.loads(row["filter"]))
                self._due[operation_id] = 0.0

    async def _make_rerun(self, flow: asyncpg.Record, version: str) -> FlowStart | None:
        try:
            return await self._reruns.start_of(flow, "latest" if version == "latest" else "same")
        except (Invalid, Conflict, ObjectsUnavailable) as error:
            log.warning(
                "An operation leaves out a flow that cannot be rerun",
                extra={"event": "rerun_refused", "flow": flow["id"], "error": error},
            )
            return None

    async def run_batch(self, operation_id: str) -> None:
        """Runs the next batch of an operation, if it is due.

        Raises:
            PostgresUnavailable: the batch may be done or not; repeating the call is safe.
        """
        loop = asyncio.get_running_loop()
        filters = self._filters.get(operation_id)
        if filters is None:
            # The loop and the creating request may run the same operation; the other one has ended
            # it.
            self._due.pop(operation_id, None)
            return
        try:
            if isinstance(filters, FlowFilter):
                result = await flow_operations.run_batch(self._pool, operation_id, filters, self._make_rerun)
            else:
                result = await operations.run_batch(
                    self._pool, operation_id, filters, source=self._settings.event_source
                )
        except (asyncpg.PostgresError, ValueRefused) as error:
            # Temporary errors are `PostgresUnavailable`; this one would repeat with each batch.
            log.exception(
                "An operation failed", extra={"event": "operation_failed", "operation": operation_id}
            )
            await operations.fail(self._pool, operation_id, f"{type(error).__name__}: {error}")
            wait_s = None
        else:
            self._producer.enqueue(result.outbox_entry)
            wait_s = result.wait_s
        if wait_s is None:
            self._due.pop(operation_id, None)
            self._filters.pop(operation_id, None)
        else:
            # Bounded: the database's clock, by which it waits, may be corrected meanwhile.
            self._due[operation_id] = loop.time() + min(wait_s, MAX_DUE_SLEEP_S)
