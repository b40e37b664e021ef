"""Reads heartbeat records, and rejects what breaks the contract or lacks the attempt's token."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.inbound import decode_heartbeat
from penstock.contracts.progress import HEADER as PROGRESS
from penstock.contracts.report_tokens import HEADER, decode_tokens, unproven_report
from penstock.core.report_tokens import ReportTokens
from penstock.kafka.processing.processor import Delivery


class HeartbeatReader:
    """Reads records.

    Args:
        report_keys: of the tokens that heartbeats must have; none asks for no tokens.
    """

    def __init__(self, report_keys: Sequence[str]) -> None:
        self._tokens = ReportTokens(report_keys)

    async def read(self, delivery: Delivery) -> Heartbeat:
        """The record without the attempts and reports of progress that do not count.

        Raises:
            InvalidRecord: the record as a whole breaks its contract.
            KafkaUnavailable: an invalid attempt was not rejected.
        """
        heartbeat, faults = decode_heartbeat(delivery.value, delivery.header(PROGRESS))
        reported = {*heartbeat.tasks, *heartbeat.progress}
        if unproven := self._tokens.unproven(reported, decode_tokens(delivery.header(HEADER))):
            heartbeat = heartbeat.without(unproven)
            # A worker may have dropped the token of an attempt that was revoked, whose lease has
            # ended. So the end of a lease without a token is no fault, and has no effect.
            if heartbeat.kind is not Kind.RELEASE:
                faults += [(unproven_report(), orjson.dumps(tuple(each))) for each in sorted(unproven)]
        if faults:
            await delivery.reject_parts(faults)
        return heartbeat
