"""Classes stay under 200 lines; those that are longer may only become shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

LIMIT = 200
LONGER = {
    "callbacks.lanes.Lanes": 315,
    "callbacks.router.Router": 228,
    "callbacks.settings.CallbacksSettings": 221,
    "callbacks.target_cache.TargetCache": 337,
    "callbacks.target_store.TargetStore": 217,
    "client.asynchronous.Client": 379,
    "client.flow_operations.FlowOperationMethods": 261,
    "contracts.context.Context": 227,
    "core.flow.working.Working": 205,
    "core.ready_partitions.ReadyPartitions": 298,
    "flow_owner.batch.Batch": 206,
    "flow_owner.evaluation.Scope": 209,
    "flow_owner.schedule_loop.ScheduleLoop": 220,
    "flows.builder.Flow": 202,
    "gateway.callback_secrets.CallbackSecretRoutes": 206,
    "gateway.operations.OperationRoutes": 212,
    "gateway.ready_consumer.ReadyConsumer": 280,
    "heartbeats.lease_tracker.LeaseTracker": 347,
    "ingest.reader.Ingest": 400,
    "kafka.processing.processor.Processor": 334,
    "local.deployment.Deployment": 280,
    "objects.__init__.ObjectStore": 268,
    "task_sync.history.History": 236,
    "task_sync.lag_poller.LagPoller": 258,
    "task_sync.limits.ReleaseLimiter": 292,
    "task_sync.recheck.Recheck": 224,
    "testing.owner_statements.OwnerStatements": 201,
    "testing.deployment.Deployment": 276,
    "testing.pipeline.Pipeline": 339,
    "testing.platform.Platform": 294,
    "testing.tables.Tasks": 280,
    "worker.app.Worker": 296,
    "worker.commands.Command": 202,
    "worker.handler_pool.HandlerPool": 314,
    "worker.heartbeat_sender.HeartbeatSender": 277,
}


@pytest.fixture(scope="module")
def longer() -> dict[str, int]:
    """The classes of more than `LIMIT` lines, docstrings and comments included."""
    return dict(longer_classes())


def longer_classes() -> Iterator[tuple[str, int]]:
    root = Path(penstock.__file__).parent
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if text.count("\n") <= LIMIT:
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > LIMIT:
                    yield f"{module}.{node.name}", lines


def test_classes_stay_short(longer: dict[str, int]) -> None:
    """A class above the limit is in the list, which has the lines that it must not exceed."""
    assert {name: lines for name, lines in longer.items() if lines > LONGER.get(name, LIMIT)} == {}


def test_the_list_has_no_class_that_became_short(longer: dict[str, int]) -> None:
    """A class that is under the limit now must not grow again."""
    assert set(LONGER) <= set(longer)
