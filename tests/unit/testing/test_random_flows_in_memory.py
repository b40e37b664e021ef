"""Random graphs in memory against the reference model, by which those in PostgreSQL are judged."""

from __future__ import annotations

import random

import orjson
import pytest
from tests.support.flows import reference
from tests.support.random_flows import LEAF, Family

from penstock.core.flow.plan import NodeKind, Policy
from penstock.testing import Pipeline
from penstock.worker import Done, Fail, Worker, WorkerSettings


async def run_to_the_end(pipeline, family):
    """Runs a flow, and sends the events of all its waits."""
    run = await pipeline.run_flow(family.document["flow"], family.inputs)
    while not run.ended:
        waits = [
            node["name"]
            for node in run.flow.nodes
            if (node["kind"], node["status"]) == (NodeKind.WAIT, "running")
        ]
        assert waits, run.nodes
        for name in waits:
            await pipeline.send_event("e", key=f"{run.id}{name}")
        await pipeline.until(run, lambda run: run.ended or any_waits(run))
    return run


def any_waits(run):
    return any((node["kind"], node["status"]) == (NodeKind.WAIT, "running") for node in run.flow.nodes)


@pytest.mark.parametrize("seed", range(3))
async def test_random_flows_end_as_the_model_says(seed):
    """F1: states of nodes and of the flow, with switches, maps, child flows, waits and timers."""
    rng = random.Random(seed)
    worker = Worker(WorkerSettings())

    @worker.stage("a.run")
    async def run_a(task):
        if task.context == "cancelled":
            await pipeline.cancel(task.id)
        return Done() if task.context == "succeeded" else Fail("as the world says", permanent=True)

    families = [Family(rng, number, Policy.CONTINUE) for number in range(25)]
    documents = [LEAF, *(family.document for family in families)]
    async with Pipeline(worker, flows=documents) as pipeline:
        for family in families:
            run = await run_to_the_end(pipeline, family)
            expected = reference(family.plan, family.world)
            assert run.nodes == expected, orjson.dumps(family.document).decode()
            failed = {"failed", "cancelled", "blocked"} & set(expected.values())
            assert run.status == ("failed" if failed else "succeeded")
            for task in pipeline.tasks_of(run):
                assert task.ended
