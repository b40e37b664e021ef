"""Runs the nightly flow through a failure, a recovery and an approval.

`make demo` calls `run` with its own deployment (`examples/media/demo.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from examples.nightly.files import make_files, mend
from examples.nightly.worker import STAGES
from penstock.client import Client

HERE = Path(__file__).parent
# Child flows come first: a definition is refused while one of its child flows is missing.
DEFINITIONS = ("build-report.yaml", "nightly.yaml")
DAY = "2026-11-23"
TIMEOUT_S = 60.0


async def run(client: Client, folder: Path, say: Callable[[str], None]) -> bool:
    """Runs the flow, and returns whether it ended as it should.

    Args:
        client: of a deployment with a worker of this example.
        folder: for the files.
        say: receives one line for each step.
    """
    await asyncio.to_thread(make_files, folder)
    for name in STAGES:
        await client.register_type(name, first_stage="run", partitions=1)
    for name in DEFINITIONS:
        await client.put_flow_definition(yaml.safe_load((HERE / name).read_text()))
    flow_id = (await client.submit_flow("nightly", {"day": DAY, "folder": str(folder)})).id
    flow = await client.wait_for_flow(flow_id, timeout_s=TIMEOUT_S)
    say(f"flow {flow_id} {flow.status}: {flow.error}")
    await asyncio.to_thread(mend, folder)
    recovered = await client.recover_flow(flow_id)
    say(f"the file is mended; nodes that run again: {', '.join(recovered['nodes'])}")
    # An event may also come before its wait; here the report is read first.
    async with asyncio.timeout(TIMEOUT_S):
        async for flow in client.watch_flow(flow_id, generation=1, every_s=0.2):
            if states(flow)["approval"] == "running":
                break
    await client.send_event("report.approved", {"by": "ana"}, key=DAY)
    flow = await client.wait_for_flow(flow_id, generation=1, timeout_s=TIMEOUT_S)
    # An item that had not begun when another failed runs in the new generation only.
    runs = Counter([child["item"] async for child in client.flow_children(flow_id, "load")])
    again = sum(times > 1 for times in runs.values())
    say(f"flow {flow_id} {flow.status}: approved by ana; {again} file was loaded again")
    return flow.status == "succeeded" and again == 1 and Path(flow.output["published"]).exists()


def states(flow: Any) -> dict[str, str]:
    """The states of a flow's nodes, by name."""
    return {node["name"]: node["status"] for node in flow.nodes}
