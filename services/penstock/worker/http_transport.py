"""The HTTP transport: a gateway claims tasks for the worker, and takes its results and heartbeats.

Its counterparts are `kafka_transport` and `pull`. The gateway answers each heartbeat, which also
tells the worker the attempts that are gone, so it needs no revocations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import orjson

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.heartbeat import Heartbeat, claims_of
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.heartbeat_queue import Answer
from penstock.errors import (
    Fatal,
    Invalid,
    InvalidRecord,
    PenstockError,
    Throttled,
    Unavailable,
    UnknownType,
)
from penstock.worker.gateway_client import HOLD_ROUTE, WAIT_S, GatewayClient
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.in_flight import InFlight, Reservation

log = logging.getLogger(__name__)

# The gateway's limits of one request.
RESULTS_PER_REQUEST = 500
# The kind of the failure that replaces a refused result.
REFUSED = "Refused"
TASKS_PER_REQUEST = 500
# Seconds of a poll that keeps room which other types may need, and seconds until an idle type takes
# its next turn.
SHORT_WAIT_S = 0.1
REST_S = 1.0
# The header with the key of a request for tasks.
REQUEST_KEY = "Idempotency-Key"


class HttpTransport:
    """Sends heartbeats and results to a gateway; the counterpart of `KafkaTransport`.

    Args:
        gateway: the gateway.
        worker_id: of the worker.
    """

    def __init__(self, gateway: GatewayClient, worker_id: str) -> None:
        self._gateway = gateway
        self._worker_id = worker_id

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Does nothing: the gateway itself writes claims and the ends of leases."""

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[AttemptId, Answer]:
        """Sends once; returns the answer for each attempt.

        Raises:
            Throttled: the gateway did not accept it, and asks for a pause.
            GatewayUnavailable: the gateway did not accept it.
        """
        attempt_ids = list(heartbeat.tasks)
        shared: dict[str, Any] = {}
        if heartbeat.max_attempts is not None:
            shared["max_attempts"] = heartbeat.max_attempts
        if not heartbeat.begun:
            shared["begun"] = False
        entries: list[dict[str, Any]] = [
            # The gateway reads the attempt's identity only, so the stage is a placeholder.
            {
                "id": attempt_id.task_id,
                "step": attempt_id.step,
                "stage": "-",
                "attempt": attempt_id.attempt,
                "outcome": "progress",
                "lease_ms": heartbeat.lease_ms,
                **shared,
                **_progress_of(heartbeat, attempt_id),
            }
            for attempt_id in attempt_ids
        ]
        try:
            body, _ = await self._gateway.post("/set_task", {"worker": self._worker_id, "results": entries})
        except (Unavailable, Fatal):
            raise
        except PenstockError as error:
            log.warning(
                "The gateway refused heartbeats",
                extra={"event": "heartbeats_refused", "attempts": len(attempt_ids), "error": error},
            )
            return dict.fromkeys(attempt_ids, Answer.UNKNOWN)
        answers = dict.fromkeys(attempt_ids, Answer.CONFIRMED)
        if body["rejected"] and heartbeat.progress:
            log.info(
                "The gateway refused reports of progress",
                extra={
                    "event": "progress_refused",
                    "reports": len(body["rejected"]),
                    "errors": body["rejected"][0].get("errors"),
                },
            )
        answers |= {attempt_ids[entry["index"]]: Answer.UNKNOWN for entry in body["rejected"]}
        answers |= {attempt_ids[entry["index"]]: Answer.GONE for entry in body.get("gone", ())}
        return answers

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once the gateway has them; tries again while it is unavailable.

        Raises:
            TypeError, ValueError: one of them cannot be encoded; none is sent.
        """
        entries = [result.to_wire() for result in results]
        orjson.dumps(entries)
        for begin in range(0, len(entries), RESULTS_PER_REQUEST):
            await self._report(entries[begin : begin + RESULTS_PER_REQUEST])

    async def _report(self, entries: list[dict[str, Any]]) -> None:
        request = {"worker": self._worker_id, "results": entries}
        try:
            body, _ = await retry_until_available(
                lambda: self._gateway.post("/set_task", request),
                waiting_for="report of results",
                backoff=WORKER_BACKOFF,
            )
        except Fatal:
            raise
        except PenstockError as error:
            # A retry would be refused too.
            log.error(  # noqa: TRY400 (the error is a field)
                "The gateway refused results",
                extra={"event": "results_refused", "results": len(entries), "error": str(error)},
            )
            if not isinstance(error, Invalid):
                # The leases of these attempts expire.
                return
            if len(entries) > 1:
                middle = len(entries) // 2
                await self._report(entries[:middle])
                await self._report(entries[middle:])
            else:
                await self._report_failures(entries, str(error))
            return
        for rejection in body["rejected"]:
            entry = entries[rejection["index"]]
            log.error(
                "The gateway rejected a result",
                extra={"event": "result_rejected", "task": entry["id"], "errors": rejection.get("errors")},
            )
            await self._report_failures([entry], str(rejection.get("errors")))

    async def _report_failures(self, entries: list[dict[str, Any]], reason: str) -> None:
        """Ends attempts whose results the gateway refused; their leases end if it refuses again."""
        failures = [
            {
                **{name: entry[name] for name in ("id", "step", "stage", "attempt")},
                "outcome": "fail",
                "permanent": True,
                "error": {"kind": REFUSED, "message": f"the gateway refused the result: {reason}"[:2000]},
            }
            for entry in entries
            if entry.get("error", {}).get("kind") != REFUSED
        ]
        if failures:
            await self._report(failures)


class HttpPuller:
    """Pulls tasks of one type from a gateway while there is room; the counterpart of `KafkaPuller`.

    Args:
        gateway: the gateway.
        type_name: the type.
        in_flight: the attempts in flight; bounds what is pulled.
        heartbeats: keeps attempts alive.
        worker_id: of the worker.
        start: called with claimed attempts to run.
        limits: most attempts by stage, for stages with a limit of their own.
        wait_s: seconds of a long poll, and of a wait for room.
        about: fields of each request that describe the worker.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        type_name: str,
        in_flight: InFlight,
        heartbeats: HeartbeatSender,
        worker_id: str,
        start: Callable[[list[ReadyTask]], object],
        limits: Mapping[str, int],
        wait_s: float = WAIT_S,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._wait_s = wait_s
        self._gateway = gateway
        self._type = type_name
        self._in_flight = in_flight
        self._heartbeats = heartbeats
        self._worker_id = worker_id
        self._start = start
        self._limits = limits
        self._about = about
        # The gateway answered the last request, with or without tasks.
        self._answered = False
        # Key and time of the request without an answer. Its repetition has this key, so that the
        # gateway sends the tasks of a lost answer again.
        self._unanswered: tuple[str, float] | None = None
        # That answer had tasks.
        self._busy = False

    async def run(self) -> None:
        """Pulls until cancelled; waits for a missing type, an unavailable gateway, and a valid key.

        Raises:
            SettingsError: there is no gateway, or it has refused this worker for too long.
        """
        while True:
            await retry_until_available(
                self._pull,
                waiting_for=f"tasks of type {self._type}",
                backoff=WORKER_BACKOFF,
                retry_on=(Unavailable, UnknownType, InvalidRecord),
            )

    async def _pull(self) -> None:
        """Claims tasks from the gateway once, if there is room for any, and starts them."""
        alone = self._in_flight.types == 1
        # The gateway may answer with as many tasks as were requested. So an idle type requests one,
        # and keeps no more room from other types.
        idle = not (alone or self._busy)
        async with self._in_flight.reserve(
            self._type, 1 if idle else TASKS_PER_REQUEST, self._wait_s
        ) as reservation:
            if not reservation.size:
                return
            waits = alone or (idle and self._in_flight.is_ample)
            await self._hold(reservation, self._wait_s if waits else SHORT_WAIT_S)
        if idle and not waits and not self._busy:
            # Other types take their turn.
            await asyncio.sleep(REST_S)

    async def _hold(self, reservation: Reservation, wait_s: float) -> None:
        max_tasks = reservation.size
        if self._unanswered is None:
            self._unanswered = uuid4().hex, asyncio.get_running_loop().time()
        key, sent_s = self._unanswered
        # After a failure without long-polling: the answer shows at once that the gateway is
        # available again.
        wait_s = wait_s if self._answered else 0.0
        request = {"worker": self._worker_id, "type": self._type, "max": max_tasks, "wait_s": wait_s}
        request |= self._about
        if self._limits:
            # The gateway claims, but only the worker knows the limits of its stages.
            request["max_attempts"] = self._limits
        answered, self._answered = self._answered, False
        try:
            body, arrived_s = await self._gateway.post(HOLD_ROUTE, request, {REQUEST_KEY: key})
        except Throttled:
            # The gateway is available, and more requests would not help it.
            self._answered = answered
            raise
        except InvalidRecord:
            if not self._about:
                raise
            # A gateway of 0.1.0 does not know these fields. The next request comes without them.
            self._about = {}
            return
        self._unanswered = None
        claimed = [ReadyTask.from_wire(raw) for raw in body["tasks"]]
        claimed = [ready for ready in claimed if ready.attempt_id not in self._in_flight]
        if claimed:
            self._in_flight.add(claimed, reservation)
            # Leases count from the gateway's claim, which lies between the request and the answer.
            claimed_s = max(sent_s, arrived_s - body.get("claimed_ms_ago", 0) / 1000)
            claims = claims_of(self._worker_id, claimed, self._limits)
            self._heartbeats.add(claims, claimed_s)
            if any(not claim.begun for claim in claims):
                self._heartbeats.send_waiting()
            self._start(claimed)
        self._answered, self._busy = True, bool(claimed)


def _progress_of(heartbeat: Heartbeat, attempt_id: AttemptId) -> dict[str, Any]:
    progress = heartbeat.progress.get(attempt_id)
    return {"progress": progress.to_wire()} if progress is not None else {}
