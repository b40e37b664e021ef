"""The Python client of the gateway: `Client` for asyncio, `SyncClient` for blocking code.

    async with Client() as client:
        task = await client.submit("media", {"file": "holiday.mp4"})
        print(await task.result())

Guarantees
- `submit` returns once the task is committed. The client gives a submission without an idempotency
  key a random one. It can then repeat the submission when the answer is lost, without creating a
  second task.
- Every refusal is raised as one of `penstock.errors`. If one field is refused, the error has a JSON
  Pointer to it.

When the gateway is unavailable, the client repeats safe requests for `patience_s` seconds: reading,
cancelling, registering, sending events, and submitting with an idempotency key. Other requests
raise `GatewayUnavailable` at once. The client repeats every request that was answered with 429,
after the delay that the gateway requests and within the same time.

The client needs neither Kafka nor PostgreSQL, nor their packages.
"""

from penstock.client.asynchronous import Client
from penstock.client.flow_models import Flow, FlowFilter
from penstock.client.flow_submission import FlowDraft
from penstock.client.models import (
    Cancelled,
    Draft,
    Operated,
    Replayed,
    SubmissionsRefused,
    Submitted,
    Task,
    TaskFilter,
    TaskProgress,
)
from penstock.client.synchronous import SyncClient

__all__ = [
    "Cancelled",
    "Client",
    "Draft",
    "Flow",
    "FlowDraft",
    "FlowFilter",
    "Operated",
    "Replayed",
    "SubmissionsRefused",
    "Submitted",
    "SyncClient",
    "Task",
    "TaskFilter",
    "TaskProgress",
]
