"""Asking a gateway: what its answers mean to a worker, and how long it is asked again by a worker that it does not let in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Row:
    """Refusals of one question in a row: when the first and the last were, and of which header for what it may."""

    first_s: float
    last_s: float
    # None: it was not known at all, which is so for any question.
    forbidden: Mapping[str, str] | None


class Refusals:
    """What is refused now, and for how long it has been.

    A question is refused until it is answered, or until it has not been asked for `SAME_REFUSAL_S` (nothing to report, no
    room, the gateway away). An answer to another question ends its refusal too when that was of a header that was not
    known, or is of another header: whoever is answered is known, and what this header may has not been asked. What was
    asked before the refusal ends none.

    Args:
        patience_s: for how many seconds any of them may be.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._rows: dict[Asked, _Row] = {}

    def note(self, what: Asked, now_s: float, forbidden: Mapping[str, str] | None = None) -> float:
        """Refused once more; returns the seconds of patience that are left, whichever question uses them up first.

        Args:
            what: the question.
            now_s: on a clock that only grows.
            forbidden: the header, if it is known and may not ask this; None if it is not known.
        """
        self._drop_old(now_s)
        row = self._rows.get(what)
        self._rows[what] = _Row(row.first_s if row else now_s, now_s, forbidden)
        return min(row.first_s for row in self._rows.values()) + self._patience_s - now_s

    def accepted(self, what: Asked, asked_s: float, sent: Mapping[str, str]) -> bool:
        """What was asked then, with this header, is answered; returns whether nothing is refused any more."""
        self._drop_old(asked_s)
        self._rows = {
            asked: row
            for asked, row in self._rows.items()
            if row.last_s > asked_s or (asked != what and row.forbidden == sent)
        }
        return not self._rows

    def _drop_old(self, now_s: float) -> None:
        self._rows = {asked: row for asked, row in self._rows.items() if now_s - row.last_s <= SAME_REFUSAL_S}


class Gateway:
    """Asks a gateway, for the time of an `async with` block.

    Args:
        url: its address.
        credentials: what it knows the worker by; None is nothing.
        patience_s: for how many seconds it may go on refusing them before the worker ends.
        let_in: told whenever it has begun to answer, and refuses nothing.
        shut_out: told whenever it has begun to refuse anything, after that.
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
        what = (path, str(body.get("type", "")))
        while True:
            sent, asked_s = self._credentials.headers, asyncio.get_running_loop().time()
            status, data, wait_s, arrived_s = await self._post(path, body, sent)
            if status not in _NOT_ALLOWED:
                break
            wrong = ""
            try:
                if self._credentials.renewed(sent):
                    continue
            except SettingsError as unusable:
                wrong = f"; {unusable}"
            forbidden = sent if status == HTTPStatus.FORBIDDEN else None
            left_s = self._refusals.note(what, arrived_s, forbidden)
            raise self._refused(f"{error_of(status, data)}{wrong}", left_s)
        if status == HTTPStatus.OK:
            answer = self._answer(path, data, len(body.get("results", ())))
            self._known = True
            self._accepted(what, asked_s, sent)
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
            self._accepted(what, asked_s, sent)
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

    def _accepted(self, what: Asked, asked_s: float, sent: Mapping[str, str]) -> None:
        # Any route will do: a worker that has no room asks for nothing, and only beats.
        if self._refusals.accepted(what, asked_s, sent) and not self._inside:
            self._inside = True
            self._let_in()

    def _refused(self, why: str, left_s: float) -> PenstockError:
        """What a refusal is to be raised as."""
        if self._inside:
            self._inside = False
            self._shut_out()
        better = "a key with the role worker that is valid for its types"
        where = self._credentials.source
        reason = f"the gateway at {self._url} does not let this worker in ({why}): "
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
