"""The records that a worker writes to Kafka, with a producer that fails first."""

import asyncio

from aiokafka.errors import NotLeaderForPartitionError

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.report_tokens import HEADER
from penstock.contracts.result import StageResult
from penstock.core.completion import Fence, Outcome
from penstock.settings import Kafka
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.kafka_transport import KafkaTransport

FENCE = Fence(7, 0, "s", 0)


class Producer:
    """Refuses the first record, and keeps the headers of the others."""

    def __init__(self):
        self.refused = asyncio.Event()
        self.headers = []

    async def send_and_wait(self, _topic, _value, *, key, headers):
        assert key == b"w"
        if not self.refused.is_set():
            self.refused.set()
            raise NotLeaderForPartitionError
        self.headers.append(dict(headers))


async def test_a_result_that_is_written_again_keeps_its_token():
    """O5, H10: the attempt may be lost between two tries, and its result counts still."""
    tokens, producer = HeldTokens(), Producer()
    tokens.add(ReadyTask(FENCE, "t", Context.encode(None), 60_000, token="secret"))
    transport = KafkaTransport(producer, Kafka(), "w", tokens)
    sending = asyncio.create_task(transport.send_results([StageResult(fence=FENCE, outcome=Outcome.DONE)]))
    await producer.refused.wait()
    tokens.drop([FENCE.attempt_id])
    await sending
    assert producer.headers == [{HEADER: b"secret"}]
