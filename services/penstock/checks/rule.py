"""The base of all rules: how offenders are found, and how they are repaired."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.checks.kafka import Topics
from penstock.checks.report import Offender, Offenders, Rule
from penstock.contracts.event import OutboxEntry
from penstock.kafka.processing.outbox import Publisher
from penstock.postgres import checks, outbox
from penstock.postgres.session import Session
from penstock.settings import Platform

# A timer may be late by this many seconds before it is an offender.
GRACE_S = 60.0

# By a version, which changes when a candidate moves.
Candidates: TypeAlias = dict[Hashable, Offenders]


@dataclass(frozen=True, slots=True)
class System:
    """The system that is checked.

    Attributes:
        settings: for the names of topics and groups.
        pool: of the database; a repair needs two connections.
        topics: of Kafka.
        show: how many offenders against one rule to name.
    """

    settings: Platform
    pool: checks.Pool
    topics: Topics
    show: int


@dataclass(frozen=True, slots=True)
class Writers:
    """The means of repairs, besides the pool.

    Attributes:
        system: that is repaired.
        session: for locks.
        producer: acks=all.
    """

    system: System
    session: Session
    producer: AIOKafkaProducer

    async def publish(self, entry: OutboxEntry) -> None:
        """Publishes what a repair wrote; the sweeper publishes what cannot be published now."""
        delete = partial(outbox.delete_published, self.system.pool)
        publisher = Publisher(self.producer, self.system.settings, delete)
        publisher.enqueue(entry)
        await publisher.drain()


class Check(ABC):
    """A rule of the invariant. Its docstring names the offender and the repair.

    Attributes:
        rule: that offenders break.
        moves: candidates are offenders only if they do not move for a while (`in_transit`).
    """

    rule: ClassVar[Rule]
    moves: ClassVar[bool] = False

    def __init__(self, system: System) -> None:
        self.system = system

    @abstractmethod
    async def find(self) -> Candidates:
        """Finds the offenders, or the candidates, as they are now.

        Raises:
            PostgresUnavailable, KafkaUnavailable: it is unknown.
        """

    async def repair(self, _writers: Writers, /) -> int:
        """Repairs all offenders by the normal mechanism and never past the fence; returns how many.

        A service that does not run cannot be replaced: without a repair the offenders stay.

        Raises:
            PostgresUnavailable, KafkaUnavailable, SessionLost: repairs that are done by then stay.
        """
        return 0


class RowCheck(Check):
    """A rule that one statement checks: the first offenders, each row with the number of all.

    Attributes:
        what: the kind of the offender; empty when each row names it.
        lacks: a sentence about a row, with the names of its columns.
        statement: its name; empty for that of the rule in checks.sql.
        arguments: of the statement, behind the number of rows.
    """

    what: ClassVar[str] = ""
    lacks: ClassVar[str] = ""
    statement: ClassVar[str] = ""
    arguments: tuple[float, ...] = (GRACE_S,)

    async def find(self) -> Candidates:
        """The first offenders."""
        name = self.statement or f"checks.{self.rule}"
        rows = await checks.fetch(self.system.pool, name, self.system.show, *self.arguments)
        if not rows:
            return {}
        first = [Offender(self.rule, self.what or row["what"], row["id"], self.sentence(row)) for row in rows]
        return {name: Offenders(first, rows[0]["found"])}

    def sentence(self, row: asyncpg.Record) -> str:
        """Says what a row lacks."""
        return self.lacks.format(**row)
