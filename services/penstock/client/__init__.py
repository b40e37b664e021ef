"""The Python client of the gateway, asynchronous (`Client`) and not (`SyncClient`), with the same methods.

    async with Client() as client:
        task = await client.submit("media", {"file": "holiday.mp4"})
        print(await client.wait([task.id]))

Guarantees
- `submit` returns once the task is committed. A submission without an idempotency key is given a random one, so
  that the client may repeat it when an answer is lost: it never makes two tasks of one call.
- Every refusal is raised as one of `penstock.errors`, with a JSON Pointer where there is one.

In doubt it repeats what is safe to repeat (reading, cancelling, registering, and submitting under a key) for
`patience_s` seconds, and raises `GatewayUnavailable` for the rest. What was refused with 429 it sends again when that says,
whatever it is, within the same time.

It needs neither Kafka nor PostgreSQL, nor the packages of either.
"""

from penstock.client.asynchronous import Client
from penstock.client.models import Cancelled, Draft, Operated, Replayed, Submitted, Task, TaskFilter
from penstock.client.synchronous import SyncClient

__all__ = [
    "Cancelled",
    "Client",
    "Draft",
    "Operated",
    "Replayed",
    "Submitted",
    "SyncClient",
    "Task",
    "TaskFilter",
]
