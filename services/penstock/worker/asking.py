"""Asking a gateway: what its answers mean to a worker, and how long it is asked again by a worker that it does not let in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import orjson

from penstock.core.delivery import parse_retry_after
from penstock.errors import GatewayUnavailable, PenstockError, SettingsError, Unavailable, UnknownType
from penstock.http.problems import error_of
from penstock.http.tokens import Credentials

# The gateway's limit of a long poll.
WAIT_S = 20.0
# Beyond the long poll, how long an answer may take.
ANSWER_S = 30.0
# Refusals further apart than a try and its answer can be are no row.
SAME_REFUSAL_S = WAIT_S + ANSWER_S + 10.0
# However long a gateway, or a proxy before it, asks to be left alone.
PATIENCE_S = 30.0

PULLING = "/hold_task"
# A route, and the type it is asked about.
Asked = tuple[str, str]

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
    PULLING: _fits_hold,
    "/set_task": _fits_set,
}


class Refusals:
    """For how long which questions have been refused.

    Args:
        patience_s: for how many seconds each may be.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        # Of each question the first and the last refusal in a row.
        self._since: dict[Asked, tuple[float, float]] = {}

    def note(self, what: Asked, now_s: float) -> float:
        """Refused once more; returns the seconds of patience that are left."""
        first_s, last_s = self._since.get(what, (now_s, now_s))
        # What was not asked for so long (nothing to report, the gateway away) was not refused either.
        if now_s - last_s > SAME_REFUSAL_S:
            first_s = now_s
        self._since[what] = (first_s, now_s)
        return first_s + self._patience_s - now_s

    def forget(self, what: Asked) -> None:
        """Not refused any more."""
        self._since.pop(what, None)

    def of(self, path: str) -> list[str]:
        """The types for which a route was refused the last time."""
        return [type_name for asked, type_name in self._since if asked == path]


class Gateway:
    """Asks a gateway, for the time of an `async with` block.

    Args:
        url: its address.
        credentials: what it knows the worker by; None is nothing.
        patience_s: for how many seconds it may go on refusing them before the worker ends.
        let_in: told whenever it has begun to answer.
        shut_out: told whenever it has begun to refuse, after it had answered.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials | None = None,
        *,
        patience_s: float = 0.0,
        let_in: Callable[[], object] = lambda: None,
        shut_out: Callable[[], object] = lambda: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._credentials = credentials or Credentials()
        self._session: aiohttp.ClientSession
        # Whether it has ever spoken as one.
        self._known = False
        self._refusals = Refusals(patience_s)
        self._inside = False
        self._let_in = let_in
        self._shut_out = shut_out

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S + ANSWER_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """The JSON object of the answer, and when it began to arrive, on the loop's clock.

        Raises:
            Throttled: asked too often, or too much at once; nothing was done.
            GatewayUnavailable: no gateway answers, or what is behind it is away, or it is no gateway that answers.
            Unavailable: also when it does not let this worker in; that may change.
            SettingsError: there is no such route at the address, and never was, or it has not let this worker in for
                `patience_s`.
            PenstockError: it refuses.
        """
        while True:
            sent = self._credentials.headers
            status, data, wait_s, arrived_s = await self._post(path, body, sent)
            if status not in _NOT_ALLOWED or not self._credentials.renewed(sent):
                break
        what = (path, str(body.get("type", "")))
        if status in _NOT_ALLOWED:
            raise self._refused(what, arrived_s, error_of(status, data))
        if status == HTTPStatus.OK:
            answer = self._answer(path, data, len(body.get("results", ())))
            self._known = True
            self._accepted(what)
            return answer, arrived_s
        if status in _NO_ROUTE:
            # A gateway has both routes. A proxy that has lost its own for a moment finds it again.
            reason = f"no gateway answers at {self._url}: {path} is answered {status}"
            raise (
                GatewayUnavailable(reason)
                if self._known
                else SettingsError(f"worker_gateway={self._url!r}: {reason}")
            )
        error = error_of(status, data, None if wait_s is None else min(wait_s, PATIENCE_S))
        if isinstance(error, UnknownType):
            # Only a gateway that has let it in speaks of types.
            self._accepted(what)
        raise error

    async def _post(
        self, path: str, body: Mapping[str, Any], sent: Mapping[str, str]
    ) -> tuple[int, bytes, float | None, float]:
        """Status and body of the answer, the seconds it asks to wait, and when it began to arrive."""
        headers = {**sent, "Content-Type": "application/json"}
        try:
            async with self._session.post(
                self._url + path, data=orjson.dumps(body), headers=headers
            ) as response:
                arrived_s = asyncio.get_running_loop().time()
                data = await response.read()
                wait_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayUnavailable(f"no gateway answers at {self._url}: {error!r}") from error
        return response.status, data, wait_s, arrived_s

    def _accepted(self, what: Asked) -> None:
        self._refusals.forget(what)
        # A worker that only reports learns nothing of whether it may pull.
        if not self._inside and what[0] == PULLING and not self._refusals.of(PULLING):
            self._inside = True
            self._let_in()

    def _refused(self, what: Asked, now_s: float, error: PenstockError) -> PenstockError:
        """What a refusal is to be raised as."""
        if self._inside:
            self._inside = False
            self._shut_out()
        left_s = self._refusals.note(what, now_s)
        better = "a key with the role worker that is valid for its types"
        where = self._credentials.source
        reason = f"the gateway at {self._url} does not let this worker in ({error}): "
        if left_s <= 0:
            # Without it nothing can be done or reported: whoever starts the worker again gives it another.
            return SettingsError(f"{reason}give it {better} in {where}, then start it again")
        if self._credentials.lasting:
            todo = f"start it again with {better} in {where}; unless it is let in before, it ends by itself"
        else:
            todo = f"put {better} into {where}, which is read before each try; else the worker ends"
        return Unavailable(f"{reason}{todo} in {left_s:.0f} s")

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
