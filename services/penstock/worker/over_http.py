"""A worker without Kafka: the gateway claims for it, and it reports and beats to the gateway.

The same duties as `link` and `pull` have over Kafka, with one thing more: the gateway answers each beat, so a worker
learns which of its attempts are gone without listening for revocations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.beats import Answer
from penstock.core.leases import Key
from penstock.core.retry import RetryPolicy
from penstock.errors import (
    Fatal,
    InvalidRecord,
    PenstockError,
    Throttled,
    Unavailable,
    UnknownType,
)
from penstock.worker.asking import PULLING, WAIT_S, Gateway
from penstock.worker.hand import Hand, claims_of, key_of
from penstock.worker.heart import Heart, wait_room

log = logging.getLogger(__name__)

WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.2, factor=2, max_s=5.0, jitter=0)
# The gateway's limits.
RESULTS_AT_ONCE = 500
TASKS_AT_ONCE = 500


class HttpLink:
    """What `link.Link` is over Kafka.

    Args:
        gateway: where to.
        worker_id: who speaks.
    """

    def __init__(self, gateway: Gateway, worker_id: str) -> None:
        self._gateway = gateway
        self._worker_id = worker_id

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Nothing: claims and releases are the gateway's to write."""

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[Key, Answer]:
        """Beats once; what came of each attempt's.

        Raises:
            Throttled: nobody heard it, and nobody wants to hear more for a while.
            GatewayUnavailable: nobody heard it.
        """
        keys = list(heartbeat.tasks)
        limit = {} if heartbeat.max_attempts is None else {"max_attempts": heartbeat.max_attempts}
        entries: list[dict[str, Any]] = [
            # The gateway looks at the attempt's key only.
            {
                "id": k[0],
                "step": k[1],
                "stage": "-",
                "attempt": k[2],
                "outcome": "progress",
                "lease_ms": heartbeat.lease_ms,
                **limit,
            }
            for k in keys
        ]
        try:
            body, _ = await self._gateway.post("/set_task", {"worker": self._worker_id, "results": entries})
        except (Unavailable, Fatal):
            raise
        except PenstockError as error:
            log.warning("%d beats were refused: %s", len(keys), error)
            return dict.fromkeys(keys, Answer.UNKNOWN)
        answers = dict.fromkeys(keys, Answer.HEARD)
        answers |= {keys[one["index"]]: Answer.UNKNOWN for one in body["rejected"]}
        answers |= {keys[one["index"]]: Answer.GONE for one in body.get("gone", ())}
        return answers

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once the gateway has them, however long that takes.

        Raises:
            TypeError, ValueError: one of them cannot be written; none is sent.
        """
        entries = [result.to_wire() for result in results]
        orjson.dumps(entries)
        for chunk in _chunks(entries):
            await self._report(chunk)

    async def _report(self, entries: list[dict[str, Any]]) -> None:
        tries = 0
        while True:
            try:
                body, _ = await self._gateway.post(
                    "/set_task", {"worker": self._worker_id, "results": entries}
                )
            except Throttled as error:
                log.warning("%d results wait %g s: %s", len(entries), error.retry_after_s, error)
                await asyncio.sleep(error.retry_after_s)
            except Unavailable as error:
                log.warning("cannot report yet: %s", error)
                tries += 1
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))
            except Fatal:
                raise
            except PenstockError as error:
                # It would be refused again however often: their leases run out, and the log says why.
                log.error("%d results were refused: %s", len(entries), error)  # noqa: TRY400 (says it all)
                return
            else:
                for one in body["rejected"]:
                    log.error(
                        "a result of task %s was refused: %s", entries[one["index"]]["id"], one.get("errors")
                    )
                return


class HttpPuller:
    """What `pull.Puller` is over Kafka: asks for tasks of one type while there is room.

    Args:
        gateway: where to.
        type_name: whose tasks.
        hand: what is in hand; decides whether there is room.
        heart: keeps alive what is in hand; decides, too.
        worker_id: who claims.
        start: begins attempts that were claimed.
        limits: tries, the first included, by stage, where a stage has its own limit.
    """

    def __init__(
        self,
        gateway: Gateway,
        type_name: str,
        hand: Hand,
        heart: Heart,
        worker_id: str,
        start: Callable[[list[ReadyTask]], object],
        limits: Mapping[str, int],
    ) -> None:
        self._gateway = gateway
        self._type = type_name
        self._hand = hand
        self._heart = heart
        self._worker_id = worker_id
        self._start = start
        self._limits = limits
        # Whether the last question was answered, with tasks or with none.
        self._answered = False

    async def run(self) -> None:
        """Pulls until cancelled; waits for a type that is not registered yet, for a gateway that is away, and to be let in.

        Raises:
            SettingsError: there is no gateway, or it does not let this worker in.
        """
        tries = 0
        while True:
            try:
                if await self._asked():
                    tries = 0
                    self._answered = True
            except Throttled as error:
                log.warning("%s: asking again in %g s: %s", self._type, error.retry_after_s, error)
                await asyncio.sleep(error.retry_after_s)
            except (Unavailable, UnknownType, InvalidRecord) as error:
                tries += 1
                self._answered = False
                log.warning("%s: asking again soon: %s", self._type, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))

    async def _asked(self) -> bool:
        """Asks once, and begins what is answered; False if there was no room to ask for."""
        if not await wait_room(self._hand, self._heart, WAIT_S):
            return False
        most = int(min(self._hand.room, self._heart.room, TASKS_AT_ONCE))
        asked_s = asyncio.get_running_loop().time()
        # It is to be known soon whether all is well again.
        wait_s = WAIT_S if self._answered else 0.0
        asking = {"worker": self._worker_id, "type": self._type, "max": most, "wait_s": wait_s}
        if self._limits:
            # The gateway claims, and only we know our stages.
            asking["max_attempts"] = self._limits
        body, arrived_s = await self._gateway.post(PULLING, asking)
        claimed = [ReadyTask.from_wire(raw) for raw in body["tasks"]]
        claimed = [ready for ready in claimed if key_of(ready) not in self._hand]
        if claimed:
            self._hand.take(claimed)
            # The platform counts from the claim: before the answer, and after the asking, which may be long ago.
            heard_s = max(asked_s, arrived_s - body.get("claimed_ms_ago", 0) / 1000)
            self._heart.take(claims_of(self._worker_id, claimed, self._limits), heard_s)
            self._start(claimed)
        return True


def _chunks(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for begin in range(0, len(entries), RESULTS_AT_ONCE):
        yield entries[begin : begin + RESULTS_AT_ONCE]
