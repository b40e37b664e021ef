"""Durations of the nodes of a flow, from real runs of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.client import SyncClient
from penstock.errors import NotFound


@dataclass(frozen=True, slots=True)
class Measured:
    """The duration of a node.

    Attributes:
        type: of its tasks.
        count: how many tasks were measured.
        takes_s: the percentile of their seconds.
    """

    type: str
    count: int
    takes_s: float


def measure(
    client: SyncClient, nodes: Mapping[str, tuple[str, str | None]], percentile: str
) -> dict[str, Measured]:
    """The duration of each node whose tasks have run.

    Args:
        client: of the deployment.
        nodes: task type and first stage of each node; without a stage the most frequent one counts.
        percentile: "p50" or "p95".
    """
    rows = {name: _tasks_of(client, name) for name in {name for name, _ in nodes.values()}}
    found = {}
    for node, (name, stage) in nodes.items():
        for row in rows[name]:
            if stage in (None, row["first_stage"]):
                found[node] = Measured(name, row["count"], row[f"{percentile}_s"])
                break
    return found


def _tasks_of(client: SyncClient, type_name: str) -> list[Mapping[str, Any]]:
    try:
        return list(client.type_durations(type_name)["tasks"])
    except NotFound:
        return []
