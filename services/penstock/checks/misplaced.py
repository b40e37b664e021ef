"""Finds stored positions that do not fit their topics, whose readers do not run.

A running reader checks its position when it starts and when its log changes. A position is
misplaced if its topic was created again, or lost the tail that it had read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import Candidates, Check, System, Writers
from penstock.core.position import Position, Start, StartReason
from penstock.errors import SessionLost
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.topology.services import INGESTED, PROCESSING_GROUPS
from penstock.kafka.topology.topics import ready, service_group, workers_group
from penstock.postgres import checks, ingest_positions

log = logging.getLogger(__name__)


class Misplaced(Check):
    """A position that does not fit its topic. It moves to where its reader would start.

    A group with members keeps it, because they move it when they start.
    """

    rule, moves = Rule.MISPLACED, True

    def __init__(self, system: System) -> None:
        super().__init__(system)
        # The positions that the last search found, of ingest by topic and of groups.
        self._ingest: dict[str, dict[int, tuple[ingest_positions.Stored | None, Start]]] = {}
        self._groups: dict[str, dict[TopicPartition, Start]] = {}

    async def find(self) -> Candidates:
        """See `Check`."""
        found: Candidates = {}
        self._ingest = {}
        for topic, reader in INGESTED:
            name = self.system.settings.prefix + topic.name
            stored = await ingest_positions.stored_all(self.system.pool, name)
            starts = await self.system.topics.check(
                {TopicPartition(name, number): Position.from_stored(*at) for number, at in stored.items()}
            )
            self._ingest[name] = {
                tp.partition: (stored[tp.partition], start) for tp, start in starts.items() if start.moved
            }
            for number, (_stored, start) in self._ingest[name].items():
                _add(found, TopicPartition(name, number), start, reader)
        self._groups = {}
        for group, reader, names in await self._readers():
            committed = await self.system.topics.positions(group)
            of_group = {tp: position for tp, position in committed.items() if tp.topic in names}
            for tp, start in (await self.system.topics.check(of_group)).items():
                # No fault of a reader: the recheck finds the tasks of ready records.
                if start.reason in {StartReason.REPLACED, StartReason.CUT}:
                    self._groups.setdefault(group, {})[tp] = start
                    _add(found, tp, start, reader)
        return found

    async def _readers(self) -> list[tuple[str, str, set[str]]]:
        """Each group with its readers and its topics."""
        prefix = self.system.settings.prefix
        readers = [
            (service_group(prefix, group), service, {prefix + topic.name for topic in topics})
            for group, service, topics in PROCESSING_GROUPS
        ]
        readers += [
            (workers_group(prefix, name), f"a worker of {name}", {prefix + ready(name, 1).name})
            for (name,) in await checks.fetch(self.system.pool, "checks.type_names")
        ]
        return readers

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`; moves what the last search found."""
        moved = 0
        for name, of_topic in self._ingest.items():
            await ingest_positions.move(self.system.pool, name, of_topic)
            moved += len(of_topic)
        for group, starts in self._groups.items():
            try:
                await self._commit(group, starts)
                moved += len(starts)
            except SessionLost as error:
                log.warning(
                    "A group has members, which move its positions when they start",
                    extra={"event": "positions_kept", "group": group, "error": str(error)},
                )
        return moved

    async def _commit(self, group: str, starts: Mapping[TopicPartition, Start]) -> None:
        consumer = make_consumer(self.system.settings, group)
        consumer.assign(list(starts))
        async with running(consumer):
            with translated():
                await consumer.commit(
                    {
                        tp: OffsetAndMetadata(start.position.offset, start.position.identity())
                        for tp, start in starts.items()
                    }
                )


def _add(found: Candidates, tp: TopicPartition, start: Start, reader: str) -> None:
    why = {
        StartReason.REPLACED: "the topic was created again",
        StartReason.CUT: "the log lost its tail",
        StartReason.DELETED: f"{start.deleted:,} records were deleted before they were read",
    }[start.reason]
    name = f"{tp.topic}/{tp.partition}"
    lacks = f"is read from {start.stored:,}, and {why}: is {reader} running?"
    found["misplaced", name, start.stored] = Offenders([Offender(Rule.MISPLACED, "topic", name, lacks)], 1)
