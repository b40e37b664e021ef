"""Reads records of results, and rejects what breaks the contract or lacks the attempt's token."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from penstock.contracts.going_on import HEADER as GOING_ON
from penstock.contracts.going_on import decode_going_on
from penstock.contracts.inbound import decode_results
from penstock.contracts.report_tokens import HEADER, decode_tokens, unproven_report
from penstock.contracts.result import StageResult
from penstock.core.report_tokens import ReportTokens
from penstock.kafka.processing.processor import Delivery


class ResultReader:
    """Reads records.

    Args:
        report_keys: of the tokens that results must have; none asks for no tokens.
    """

    def __init__(self, report_keys: Sequence[str]) -> None:
        self._tokens = ReportTokens(report_keys)

    async def read(self, delivery: Delivery) -> tuple[str, list[StageResult]]:
        """The worker of a record, and the results that count.

        Raises:
            InvalidRecord: the record as a whole cannot be read.
            KafkaUnavailable: an invalid result was not rejected.
        """
        worker, results, faults = decode_results(delivery.value)
        # With tokens no worker goes on: only a ready record has one.
        if not self._tokens and (going_on := decode_going_on(delivery.header(GOING_ON))):
            for result in results:
                result.goes_on = going_on.get((result.fence.id, result.fence.step))
        if self._tokens:
            given = decode_tokens(delivery.header(HEADER))
            # The failures of malformed entries are among the results: a guess must not end an
            # attempt by one of them.
            unproven = self._tokens.unproven((result.fence.attempt_id for result in results), given)
            refused = [result for result in results if result.fence.attempt_id in unproven]
            faults += [(unproven_report(), orjson.dumps(result.to_wire())) for result in refused]
            results = [result for result in results if result.fence.attempt_id not in unproven]
        if faults:
            await delivery.reject_parts(faults)
        return worker, results
