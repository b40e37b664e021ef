"""Writes results; one that Kafka refuses fails its attempt, and no other."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from penstock.contracts.result import StageResult, encode_results, unwritable
from penstock.errors import KafkaUnavailable, RecordsRefused

log = logging.getLogger(__name__)


async def write_results(
    write: Callable[[bytes, Sequence[StageResult]], Awaitable[None]],
    worker: str,
    results: Sequence[StageResult],
) -> None:
    """Writes results as one record; when Kafka refuses it, in halves until the cause is alone.

    Args:
        write: writes a record; gets its value and the results in it.
        worker: that reports the results.
        results: of ended attempts.

    Raises:
        KafkaUnavailable: not all were written; write them again.
        TypeError, ValueError: one of them cannot be encoded; none is written.
    """
    try:
        await write(encode_results(worker, results), results)
    except RecordsRefused as error:
        middle = len(results) // 2
        if middle:
            await write_results(write, worker, results[:middle])
            await write_results(write, worker, results[middle:])
            return
        log.error(  # noqa: TRY400 (the traceback says nothing about the result)
            "Kafka refuses a result; its attempt fails",
            extra={"event": "result_refused", **results[0].fence.ids(), "error": str(error)},
        )
        # No attempt follows a failure.
        results[0].goes_on, results[0].follows = None, None
        try:
            await write(encode_results(worker, [unwritable(results[0], error)]), results)
        except RecordsRefused as again:
            # The topic takes no result at all, until an operator changes it.
            raise KafkaUnavailable(str(again)) from again
