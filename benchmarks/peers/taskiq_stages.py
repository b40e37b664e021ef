"""The three stages as taskiq tasks, for both brokers."""

from __future__ import annotations

from typing import Any

from taskiq import AsyncBroker, AsyncTaskiqDecoratedTask

from benchmarks.peers import job


def stages(broker: AsyncBroker) -> AsyncTaskiqDecoratedTask[Any, Any]:
    """Registers the stages; returns the first."""

    @broker.task
    async def three(context: dict[str, Any]) -> None:
        await job.work_async()
        job.ended(context)

    @broker.task
    async def two(context: dict[str, Any]) -> None:
        await job.work_async()
        await three.kiq(context)

    @broker.task
    async def one(context: dict[str, Any]) -> None:
        job.started(context)
        await job.work_async()
        await two.kiq(context)

    return one
