"""Finds topics whose records their writers stamp, as in older versions.

Kafka refuses a record that a writer stamps more than an hour ahead, and deletes by stamps: the
clock of one process decides about acceptance and retention.
"""

from __future__ import annotations

import asyncio
import time

from penstock.checks.report import Offender, Offenders, Rule
from penstock.kafka.topology import topic_plan
from penstock.kafka.topology.topic_config import STAMP
from penstock.settings import Kafka


class Unstamped:
    """Finds and changes such topics.

    Args:
        settings: for the names of topics.
        show: how many to name.
    """

    def __init__(self, settings: Kafka, show: int) -> None:
        self._settings = settings
        self._show = show
        self._found: list[topic_plan.Difference] = []

    async def find(self) -> list[Offenders]:
        """The topics whose stamps are not the broker's.

        Raises:
            KafkaUnavailable: no broker answered.
            KafkaRefused: this user may not describe the topics.
        """
        plan = await topic_plan.plan(self._settings)
        self._found = [each for each in plan if each.what == STAMP]
        lacks = "has the stamps of its writers: Kafka refuses or deletes records by a wrong clock"
        first = [Offender(Rule.UNSTAMPED, "topic", each.topic, lacks) for each in self._found[: self._show]]
        return [Offenders(first, len(self._found))] if self._found else []

    async def stamp(self) -> int:
        """Lets the broker stamp the records of the topics last found; returns how many.

        Raises:
            KafkaUnavailable: some may not be changed.
            KafkaRefused: this user may not change the topics.
        """
        await topic_plan.stamp(self._settings, self._found)
        stamped = len(self._found)
        # Brokers learn of a change one after the other. The second check names what is left.
        deadline_s = time.monotonic() + topic_plan.SETTLE_S
        while time.monotonic() < deadline_s:
            if not await self.find():
                break
            await asyncio.sleep(0.1)
        return stamped
