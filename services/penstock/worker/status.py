"""The status of a worker over Kafka, which it writes also when it has no task."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator

import penstock
from penstock.contracts.worker_status import MOST_ATTEMPTS, encode_statuses
from penstock.core.attempt import AttemptId
from penstock.core.worker_list import INTERVAL_S, OfType, WorkerStatus
from penstock.kafka.processing.worker_status import StatusSender
from penstock.worker.in_flight import InFlight
from penstock.worker.kafka_transport import KafkaTransport
from penstock.worker.registered import Registered


def status_sender(
    registered: Registered, worker_id: str, in_flight: InFlight, transport: KafkaTransport
) -> StatusSender:
    """Writes the status of a worker while it runs.

    Args:
        registered: of the worker.
        worker_id: of the worker.
        in_flight: its attempts.
        transport: writes the records.
    """

    def values(stopped: bool) -> Iterator[bytes]:
        return encode_statuses(status_of(registered, worker_id, in_flight, stopped=stopped))

    return StatusSender(values, transport.send_status, INTERVAL_S)


def status_of(registered: Registered, worker_id: str, in_flight: InFlight, *, stopped: bool) -> WorkerStatus:
    """The status of a worker as of now; arguments as above."""
    stages = registered.stages_by_type
    counts, attempts = in_flight.by_type, defaultdict[str, list[AttemptId]](list)
    # Those that it has had for longest: short ones would have ended when the record is read.
    for attempt_id, type_name in in_flight.first(MOST_ATTEMPTS):
        attempts[type_name].append(attempt_id)
    return WorkerStatus(
        id=worker_id,
        kind="worker",
        host=socket.gethostname(),
        interval_s=INTERVAL_S,
        types={name: OfType(sorted(stages[name]), counts[name], attempts[name]) for name in sorted(stages)},
        version=penstock.__version__,
        slots=registered.slots,
        room=max(0, in_flight.room),
        stopped=stopped,
    )
