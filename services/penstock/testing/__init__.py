"""Test a pipeline in memory, in milliseconds: `Pipeline` runs the stages of a worker.

    async def test_an_order_is_charged():
        async with Pipeline(worker) as pipeline:
            run = await pipeline.run("order", {"amount": 5})
            assert run.stages == ["reserve", "charge"]
            assert run.result == {"charged": 5}

Guarantees
- Handlers run by the code of the worker, and the code of the services decides what follows. The
  flows are advanced by the code of the service `flows` itself, on rows in memory.
- One suite of tests runs against `Pipeline` and against a real deployment
  (`tests/integration/testing`).
- The clock of a pipeline stands still until a test steps it. So delays, back-off, leases and
  timeouts of days take no time.

It fails loudly: a task that cannot end raises, instead of a test that hangs.

What it has not: limits and fairness of types, the window, schedules, calls of callbacks, history.
"""

from penstock.testing.deployment import Deployment
from penstock.testing.flow_run import FlowRun
from penstock.testing.models import Attempt, LogLine, NoEnd, Run
from penstock.testing.pipeline import Pipeline
from penstock.testing.published import SentCallback

__all__ = ["Attempt", "Deployment", "FlowRun", "LogLine", "NoEnd", "Pipeline", "Run", "SentCallback"]
