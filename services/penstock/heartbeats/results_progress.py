"""How far the stage processor has committed the results of workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient

from penstock.kafka.client.connection import admin_client, translated
from penstock.kafka.client.offset_reader import OffsetReader, observing
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import STAGE_RESULTS, service_group
from penstock.settings import Kafka


class ResultsProgress:
    """Ends of the results topic, and the offsets up to which its results are in PostgreSQL.

    Args:
        settings: for the names of topic and group.
        offsets: asks for ends.
        admin: asks for committed offsets.
    """

    def __init__(self, settings: Kafka, offsets: OffsetReader, admin: AIOKafkaAdminClient) -> None:
        self._offsets = offsets
        self._admin = admin
        self._group = service_group(settings.prefix, "stages")
        self._partitions = [
            (STAGE_RESULTS.name, number) for number in range(partitions_of(settings, STAGE_RESULTS))
        ]

    async def ends(self) -> dict[int, int]:
        """The offset behind the newest result, by partition.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ends = await self._offsets.ends(self._partitions)
        return {number: end for (_topic, number), end in ends.items()}

    async def committed(self, ends: Mapping[int, int]) -> dict[int, int]:
        """The offset up to which every result is in PostgreSQL, for the partitions of `ends`.

        Records that Kafka has deleted count as committed: no processor can read them any more.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            offsets = await self._admin.list_consumer_group_offsets(self._group)
        # An offset of another log does not tell which results of this one were read.
        commits = await self._offsets.commits_of_logs(offsets)
        committed = {tp.partition: max(commit.offset, 0) for tp, commit in commits.items()}
        found = {number: committed.get(number, 0) for number in ends}
        if ahead := [number for number, end in ends.items() if found[number] > end]:
            now = await self._offsets.ends([(STAGE_RESULTS.name, number) for number in ahead])
            for (_topic, number), end in now.items():
                if found[number] > end:
                    # Committed for a log that lost its tail: which results were read is unknown.
                    found[number] = 0
        if behind := [number for number, end in ends.items() if found[number] < end]:
            beginnings = await self._offsets.beginnings([(STAGE_RESULTS.name, number) for number in behind])
            for (_topic, number), beginning in beginnings.items():
                found[number] = max(found[number], beginning)
        return found


@asynccontextmanager
async def results_progress(settings: Kafka) -> AsyncIterator[ResultsProgress]:
    """The progress of the stage processor, with connections until the end of the block.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    async with observing(settings) as offsets, admin_client(settings) as admin:
        yield ResultsProgress(settings, offsets, admin)
