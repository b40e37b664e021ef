"""Records of workers about themselves (`worker-status.schema.json`).

Each worker writes one every few seconds, also when it has no task, and a last one that says that it
ends. A gateway writes one too, with the workers over HTTP that have sent requests since its last
one. This module only encodes, so that the SDK stays light; `contracts.inbound_workers` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from penstock.core.worker_list import OfType, WorkerStatus

# Attempts of one worker in a record.
MOST_ATTEMPTS = 100
# Bytes of workers over HTTP in one record of a gateway, well below the limit of a record.
RECORD_BYTES = 200_000


def status_to_wire(status: WorkerStatus) -> dict[str, Any]:
    """A worker as records have it; fields without a value are left out."""
    wire: dict[str, Any] = {
        "id": status.id,
        "kind": status.kind,
        "host": status.host,
        "interval_s": status.interval_s,
        "types": {name: _type_to_wire(of_type) for name, of_type in status.types.items()},
    }
    for name in ("version", "slots", "room"):
        if (value := getattr(status, name)) is not None:
            wire[name] = value
    if status.silent_ms:
        wire["silent_ms"] = status.silent_ms
    if status.stopped:
        wire["stopped"] = True
    return wire


def _type_to_wire(of_type: OfType) -> dict[str, Any]:
    wire: dict[str, Any] = {}
    if of_type.stages is not None:
        wire["stages"] = list(of_type.stages)
    if of_type.in_flight:
        wire["in_flight"] = of_type.in_flight
        wire["attempts"] = [tuple(attempt_id) for attempt_id in of_type.attempts]
    return wire


def encode_statuses(status: WorkerStatus, over_http: Iterable[WorkerStatus] = ()) -> Iterator[bytes]:
    """The values of the records of a worker or gateway: one, or as many as its workers need.

    Args:
        status: of the writer.
        over_http: workers over HTTP that a gateway has seen.
    """
    wire = status_to_wire(status)
    some: list[orjson.Fragment] = []
    size = 0
    for encoded in (orjson.dumps(status_to_wire(each)) for each in over_http):
        if some and size + len(encoded) > RECORD_BYTES:
            yield orjson.dumps({**wire, "over_http": some})
            some, size = [], 0
        some.append(orjson.Fragment(encoded))
        size += len(encoded)
    yield orjson.dumps({**wire, "over_http": some} if some else wire)
