"""Submits many tasks or flows; those that wait for a server of the gateway, again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from penstock.client.chunks import Entry, chunks, pointer_of
from penstock.client.models import SubmissionsRefused, Submitted, submitted_of
from penstock.client.transport import Transport
from penstock.core.retry import RetryPolicy
from penstock.errors import GatewayUnavailable, Invalid, InvalidRecord, Throttled
from penstock.http.problems import relocated

D = TypeVar("D")

_PAUSE = RetryPolicy(base_s=1.0, factor=2, max_s=5.0, jitter=0.5)


async def submit_all(
    transport: Transport,
    kind: str,
    drafts: Iterable[D],
    encode: Callable[[D], tuple[Mapping[str, Any], bool]],
    patience_s: float,
    progress: Callable[[int], None] | None,
    read_result: Callable[..., Any],
) -> list[Submitted]:
    """Submits any number of entries, in requests that the gateway accepts.

    Args:
        transport: sends the requests.
        kind: `tasks` or `flows`: the path, and the field of its answer.
        drafts: the entries.
        encode: returns the JSON object of an entry, and whether the client generated its
            idempotency key.
        patience_s: how long entries are repeated that wait for a server.
        progress: called after each request with the number of its entries.
        read_result: see `Submitted`.

    Raises:
        Invalid: none is submitted.
        SubmissionsRefused: some are refused, or wait for the object store.
    """
    submitted: list[Submitted | None] = []
    faults: list[Invalid] = []

    def entries() -> Iterator[Entry]:
        for position, draft in enumerate(drafts):
            submitted.append(None)
            try:
                wire, generated = encode(draft)
                yield Entry.encode(position, wire, generated=generated)
            except Invalid as error:
                # One entry that cannot be encoded stops no other.
                faults.append(relocated(error, lambda pointer: f"/{position}{pointer}"))  # noqa: B023 (used at once)

    for chunk in chunks(entries()):
        try:
            outcomes = await submit_chunk(transport, kind, chunk, patience_s)
        except Invalid as error:
            # No entry of this request is submitted.
            faults.append(relocated(error, lambda pointer: pointer_of(pointer, chunk)))  # noqa: B023 (used at once)
        else:
            for found, entry in zip(outcomes, chunk, strict=True):
                submitted[entry.position] = submitted_of(found, read_result, generated=entry.generated)
                faults += [
                    InvalidRecord(each["detail"], pointer=pointer_of(each["pointer"], chunk))
                    for each in found.get("errors", ())
                ]
        if progress is not None:
            progress(len(chunk))
    if faults:
        raise SubmissionsRefused.of(sorted(faults, key=_position), submitted)
    return [each for each in submitted if each is not None]


def _position(error: Invalid) -> int:
    head = error.faults[0].pointer.removeprefix("/").partition("/")[0]
    return int(head) if head.isdigit() else -1


async def submit_chunk(
    transport: Transport, kind: str, chunk: Sequence[Entry], patience_s: float
) -> list[dict[str, Any]]:
    """The gateway's documents about the entries, in their order.

    An entry without an idempotency key is not repeated: an answer that is lost could double it.

    Args:
        transport: sends the requests.
        kind: as for `submit_all`.
        chunk: the entries.
        patience_s: how long entries are repeated that wait for a server.

    Raises:
        Invalid: no entry is submitted.
        GatewayUnavailable, Throttled: the gateway did not take the request.
    """
    answer = await _send(transport, kind, chunk)
    outcomes: list[dict[str, Any]] = [*answer[kind]]
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    failures = 0
    while waiting := [
        index for index, found in enumerate(outcomes) if found.get("retry") and chunk[index].repeatable
    ]:
        failures += 1
        pause_s = _PAUSE.delay_s(failures, random.random())  # noqa: S311 (jitter)
        if loop.time() + pause_s > until_s:
            break
        await asyncio.sleep(pause_s)
        try:
            answer = await _send(transport, kind, [chunk[index] for index in waiting])
        except (GatewayUnavailable, Throttled, Invalid):
            # None of them is submitted. The caller must learn of the others.
            continue
        for index, found in zip(waiting, answer[kind], strict=True):
            if "id" in found:
                outcomes[index] = found
    return outcomes


async def _send(transport: Transport, kind: str, entries: Sequence[Entry]) -> dict[str, Any]:
    body = b"[" + b",".join(entry.data for entry in entries) + b"]"
    safe = all(entry.repeatable for entry in entries)
    return await transport._request("POST", f"/{kind}", body, safe=safe)  # noqa: SLF001 (the protocol's own method)
