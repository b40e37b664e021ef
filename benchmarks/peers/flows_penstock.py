"""Penstock's flows: definitions with maps and child flows, started by HTTP, one worker process.

python -m benchmarks.peers.flows_penstock      # the worker
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers import job
from penstock.client import Client
from penstock.worker import Done, Task, Worker

ITEMS = list(range(job.JOIN))


def _task(type_name: str, *after: str) -> dict[str, Any]:
    return {"kind": "task", "type": type_name, "after": list(after), "input": "inputs.context"}


def definitions() -> list[dict[str, Any]]:
    """The flows, children first."""
    each = {"kind": "task", "type": "step", "input": "item"}
    nodes: dict[str, dict[str, Any]] = {
        "chain": {"a": _task("step"), "b": _task("step", "a"), "c": _task("last", "b")},
        "join": {
            "m": {"kind": "map", "items": "inputs.items", "parallel": job.JOIN, "each": each},
            "c": _task("last", "m"),
        },
        f"nest{job.DEPTH}": {"t": _task("last")},
    }
    for level in range(job.DEPTH - 1, 0, -1):
        child = {
            "kind": "flow", "flow": f"nest{level + 1}", "after": ["t"],
            "input": '{"context": inputs.context}',
        }  # fmt: skip
        nodes[f"nest{level}"] = {"t": _task("step"), "child": child}
    inputs = {"join": {"context": {}, "items": {}}}
    return [
        {"flow": name, "version": 1, "nodes": of_flow, "inputs": inputs.get(name, {"context": {}})}
        for name, of_flow in nodes.items()
    ]


async def prepare() -> None:
    """Registers the types and uploads the definitions."""
    async with Client() as client:
        for name in ("step", "last"):
            await client.register_type(name, first_stage="one")
        for definition in definitions():
            await client.put_flow_definition(definition)


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Starts a flow per request."""
    async with Client() as client:

        async def submit(context: dict[str, Any]) -> None:
            flow = context.get("flow", "chain")
            inputs: dict[str, Any] = {"context": context}
            if flow == "join":
                inputs["items"] = ITEMS
            name = "nest1" if flow == "nest" else flow
            await client.submit_flow(name, inputs, labels={"n": str(context["n"])})

        yield submit


def make_worker() -> Worker:
    """Creates the worker."""
    worker = Worker()

    @worker.stage("step.one")
    async def step(_task: Task) -> Done:
        return Done(None)

    @worker.stage("last.one")
    async def last(task: Task) -> Done:
        job.ended(task.context)
        return Done(None)

    return worker


if __name__ == "__main__":
    make_worker().run()
