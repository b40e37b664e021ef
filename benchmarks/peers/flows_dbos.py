"""DBOS: workflows with steps, a fan-out on a queue, and child workflows.

    python -m benchmarks.peers.flows_dbos      # the worker

The settings are those of `benchmarks.peers.dbos_workflow`. A chain is a workflow of three steps.
The fan-out enqueues a workflow for each item and awaits each result, as DBOS's guide on queues
does. A level of the nesting runs a step and calls the next workflow, which DBOS then records as a
child.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dbos import DBOS, DBOSClient

from benchmarks.peers import job
from benchmarks.peers.dbos_workflow import POLL_S, QUEUE, URL, launch, prepare

__all__ = ["prepare", "submitter"]

ITEMS = "items"


@DBOS.step()
def step(_given: Any) -> None:
    """A step that does nothing."""


@DBOS.step()
def last(context: dict[str, Any]) -> None:
    """The last step of a flow."""
    job.ended(context)


@DBOS.workflow(name="item")
def item(_number: int) -> None:
    """An item of the fan-out."""


@DBOS.workflow(name="chain")
def chain(context: dict[str, Any]) -> None:
    """Three steps."""
    step(1)
    step(2)
    last(context)


@DBOS.workflow(name="join")
def join(context: dict[str, Any]) -> None:
    """The items, then one step."""
    for handle in [DBOS.enqueue_workflow(ITEMS, item, number) for number in range(job.JOIN)]:
        handle.get_result()
    last(context)


@DBOS.workflow(name="nest")
def nest(context: dict[str, Any], depth: int = 1) -> None:
    """A level: a step, then the next level."""
    if depth == job.DEPTH:
        last(context)
    else:
        step(depth)
        nest(context, depth + 1)


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Enqueues a workflow."""
    client = DBOSClient(system_database_url=URL, lazy=True)

    async def submit(context: dict[str, Any]) -> None:
        options = {
            "workflow_name": context.get("flow", "chain"),
            "queue_name": QUEUE,
            "workflow_id": f"n_{context['n']}",
        }
        await client.enqueue_async(options, context)  # type: ignore[arg-type]

    yield submit
    client.destroy()


if __name__ == "__main__":
    launch()
    DBOS.register_queue(ITEMS, polling_interval_sec=POLL_S)
    threading.Event().wait()
