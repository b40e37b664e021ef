"""Writes records in batches; finds the records that the broker refuses, and writes the others.

A broker refuses a batch as a whole. It is divided in halves until each refused record is alone, so
one bad record holds up no other. The halves are written after the batches that followed, so a
refusal may change the order of a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.kafka.client.connection import own_cancellation, translated
from penstock.kafka.client.pending_writes import acknowledged
from penstock.kafka.client.refusals import REFUSALS, SEQUENCE_LOST, count_refusal

Headers = Sequence[tuple[str, bytes]]
# Key and value, and the headers if there are any.
Record = tuple[bytes | None, bytes] | tuple[bytes | None, bytes, Headers]


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch on its way to Kafka.

    Attributes:
        producer: sends the batch.
        topic: in full.
        partition: of the topic.
        records: of the batch.
        begin: the position of its first record in the call.
        future: done when the broker has answered.
    """

    producer: AIOKafkaProducer
    topic: str
    partition: int
    records: Sequence[Record]
    begin: int
    future: asyncio.Future[object]

    async def send_again(self, begin: int, end: int) -> list[SentBatch]:
        """Sends some of its records once more.

        Raises:
            KafkaUnavailable: not all could be queued.
        """
        records = self.records[begin:end]
        return await send_in_batches(self.producer, self.topic, self.partition, records, self.begin + begin)


async def send_in_batches(
    producer: AIOKafkaProducer, topic: str, partition: int, records: Iterable[Record], begin: int = 0
) -> list[SentBatch]:
    """Writes records to one partition, in order and in batches, which `refusals` awaits.

    Args:
        producer: acks=all.
        topic: in full.
        partition: of the topic.
        records: to be written.
        begin: the position of the first record.

    Raises:
        KafkaUnavailable: not all could be queued.
    """
    sent: list[SentBatch] = []
    unsent: list[Record] = []

    def add(future: asyncio.Future[object], records: list[Record]) -> None:
        first = sent[-1].begin + len(sent[-1].records) if sent else begin
        sent.append(SentBatch(producer, topic, partition, records, first, future))

    with own_cancellation(), translated():
        batch = producer.create_batch()
        for record in records:
            if _append(batch, record):
                unsent.append(record)
                continue
            if unsent:
                add(await producer.send_batch(batch, topic, partition=partition), unsent)
                batch, unsent = producer.create_batch(), []
            if _append(batch, record):
                unsent.append(record)
            else:
                # A record larger than a batch is sent alone, up to the topic's limit.
                add(await _send_alone(producer, topic, partition, record), [record])
                batch = producer.create_batch()
        if unsent:
            add(await producer.send_batch(batch, topic, partition=partition), unsent)
    return sent


def _append(batch: Any, record: Record) -> bool:
    """Adds a record to a batch; returns whether it had room."""
    key, value = record[:2]
    return batch.append(key=key, value=value, timestamp=None, headers=_headers(record)) is not None


def _headers(record: Record) -> Headers:
    return record[2] if len(record) == 3 else []


async def _send_alone(
    producer: AIOKafkaProducer, topic: str, partition: int, record: Record
) -> asyncio.Future[object]:
    key, value = record[:2]
    try:
        return await producer.send(  # type: ignore[no-any-return]  # aiokafka has no types
            topic, value, key=key, partition=partition, headers=_headers(record)
        )
    except REFUSALS as error:
        # The client itself refuses a record above its own limit.
        count_refusal(topic, error)
        refused: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused


async def refusals(
    sent: Sequence[SentBatch], *, retry_lost: bool = True, patient: bool = False
) -> dict[int, str]:
    """Waits until Kafka has the records; returns its reasons for refusals, by position.

    Args:
        sent: by `send_in_batches`.
        retry_lost: whether batches are sent again whose sequence the broker does not know.
        patient: whether it waits until the topic takes records, and not for `WRITE_S` seconds.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
    """
    if not patient and sent:
        await acknowledged(sent[0].producer, sent[0].topic, [batch.future for batch in sent])
    answers = await asyncio.gather(*(batch.future for batch in sent), return_exceptions=True)
    refused: dict[int, str] = {}
    for batch, answer in zip(sent, answers, strict=True):
        if retry_lost and isinstance(answer, SEQUENCE_LOST):
            refused |= await refusals(
                await batch.send_again(0, len(batch.records)), retry_lost=False, patient=patient
            )
        elif isinstance(answer, REFUSALS):
            if len(batch.records) == 1:
                refused[batch.begin] = repr(answer)
                continue
            middle = len(batch.records) // 2
            for begin, end in ((0, middle), (middle, len(batch.records))):
                refused |= await refusals(
                    await batch.send_again(begin, end), retry_lost=retry_lost, patient=patient
                )
        elif isinstance(answer, BaseException):
            with own_cancellation(), translated():
                raise answer
    return refused
