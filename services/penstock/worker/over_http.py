"""A worker without Kafka: the gateway claims for it, and it reports and beats to the gateway.

The same duties as `link` and `pull` have over Kafka, with one thing more: the gateway answers each beat, so a worker
learns which of its attempts are gone without listening for revocations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import orjson

from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.beats import Answer
from penstock.core.delivery import parse_retry_after
from penstock.core.leases import Key
from penstock.core.retry import RetryPolicy
from penstock.errors import (
    Fatal,
    GatewayUnavailable,
    InvalidRecord,
    PenstockError,
    SettingsError,
    Throttled,
    Unavailable,
    UnknownType,
)
from penstock.http.problems import error_of
from penstock.http.tokens import bearer
from penstock.worker.hand import Hand, claims_of, key_of
from penstock.worker.heart import Heart, wait_room

log = logging.getLogger(__name__)

WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.2, factor=2, max_s=5.0, jitter=0)
# The gateway's limits.
RESULTS_AT_ONCE = 500
TASKS_AT_ONCE = 500
WAIT_S = 20.0
# Beyond the long poll, how long an answer may take.
ANSWER_S = 30.0
# However long a gateway, or a proxy before it, asks to be left alone.
PATIENCE_S = 30.0

_NOT_ALLOWED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NO_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


def _fits_hold(answer: Mapping[str, Any], _entries: int) -> bool:
    # Gateways of an earlier version do not say when they claimed.
    ago_ms = answer.get("claimed_ms_ago", 0)
    return isinstance(answer.get("tasks"), list) and isinstance(ago_ms, int | float) and ago_ms >= 0


def _fits_set(answer: Mapping[str, Any], entries: int) -> bool:
    told = (answer.get("rejected"), answer.get("gone", []))
    return all(
        isinstance(ones, list)
        and all(isinstance(one, dict) and one.get("index") in range(entries) for one in ones)
        for ones in told
    )


# Whether an answer is a gateway's, by route: what is read of it is there. The second argument is how many entries
# were sent.
_FITS: Mapping[str, Callable[[Mapping[str, Any], int], bool]] = {
    "/hold_task": _fits_hold,
    "/set_task": _fits_set,
}


class Gateway:
    """Asks a gateway, for the time of an `async with` block.

    Args:
        url: its address.
        api_key: that it knows the worker by; empty is none.

    Raises:
        SettingsError: the key is none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = bearer(api_key)
        self._session: aiohttp.ClientSession
        # Whether it has ever spoken as one.
        self._known = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=WAIT_S + ANSWER_S), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """The JSON object of the answer, and when it began to arrive, on the loop's clock.

        Raises:
            Throttled: asked too often, or too much at once; nothing was done.
            GatewayUnavailable: no gateway answers, or what is behind it is away, or it is no gateway that answers.
            SettingsError: there is no such route at the address, and never was, or the gateway does not know the API key.
            PenstockError: it refuses.
        """
        try:
            async with self._session.post(
                self._url + path, data=orjson.dumps(body), headers={"Content-Type": "application/json"}
            ) as response:
                arrived_s = asyncio.get_running_loop().time()
                data = await response.read()
                wait_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayUnavailable(f"no gateway answers at {self._url}: {error!r}") from error
        if response.status == HTTPStatus.OK:
            answer = self._answer(path, data, len(body.get("results", ())))
            self._known = True
            return answer, arrived_s
        if response.status in _NO_ROUTE:
            # A gateway has both routes. A proxy that has lost its own for a moment finds it again.
            reason = f"no gateway answers at {self._url}: {path} is answered {response.status}"
            raise (
                GatewayUnavailable(reason)
                if self._known
                else SettingsError(f"worker_gateway={self._url!r}: {reason}")
            )
        if response.status in _NOT_ALLOWED:
            # Without it nothing can be done or reported: whoever starts the worker again gives it another.
            raise SettingsError(
                f"the gateway at {self._url} does not let this worker in ({error_of(response.status, data)}): set "
                "PENSTOCK_API_KEY to a key with the role worker that is valid for its types"
            )
        raise error_of(response.status, data, None if wait_s is None else min(wait_s, PATIENCE_S))

    def _answer(self, path: str, data: bytes, entries: int) -> dict[str, Any]:
        """A proxy, a login page or half an answer may come with status 200, too; what is in it is not ours to act on."""
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict) or not _FITS[path](answer, entries):
            excerpt = data[:200].decode(errors="replace")
            reason = f"no gateway answers at {self._url}: {path} is answered 200 with {excerpt!r}"
            raise GatewayUnavailable(reason)
        return answer


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

    async def run(self) -> None:
        """Pulls until cancelled; waits for a type that is not registered yet, and for a gateway that is away."""
        tries = 0
        while True:
            try:
                await self._pull()
                tries = 0
            except Throttled as error:
                log.warning("%s: asking again in %g s: %s", self._type, error.retry_after_s, error)
                await asyncio.sleep(error.retry_after_s)
            except (Unavailable, UnknownType, InvalidRecord) as error:
                tries += 1
                log.warning("%s: asking again soon: %s", self._type, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))

    async def _pull(self) -> None:
        if not await wait_room(self._hand, self._heart, WAIT_S):
            return
        most = int(min(self._hand.room, self._heart.room, TASKS_AT_ONCE))
        asked_s = asyncio.get_running_loop().time()
        asking = {"worker": self._worker_id, "type": self._type, "max": most, "wait_s": WAIT_S}
        if self._limits:
            # The gateway claims, and only we know our stages.
            asking["max_attempts"] = self._limits
        body, arrived_s = await self._gateway.post("/hold_task", asking)
        claimed = [ReadyTask.from_wire(raw) for raw in body["tasks"]]
        claimed = [ready for ready in claimed if key_of(ready) not in self._hand]
        if claimed:
            self._hand.take(claimed)
            # The platform counts from the claim: before the answer, and after the asking, which may be long ago.
            heard_s = max(asked_s, arrived_s - body.get("claimed_ms_ago", 0) / 1000)
            self._heart.take(claims_of(self._worker_id, claimed, self._limits), heard_s)
            self._start(claimed)


def _chunks(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for begin in range(0, len(entries), RESULTS_AT_ONCE):
        yield entries[begin : begin + RESULTS_AT_ONCE]
