"""Answers to requests for tasks that may have been lost on the way to their worker.

The system accepts an answer before the worker has it. When a proxy, or the way to it, is gone, the
gateway notices nothing: the tasks would wait for their leases and be charged a loss. So a worker
repeats a request without an answer under the same key, and gets the same tasks. They are kept in
the memory of the process: after its end, or a repetition at another gateway, they wait for their
leases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.contracts.ready import ReadyTask
from penstock.gateway.hold_requests import ClaimedTasks

# The header with the key of a request.
REQUEST_KEY = "Idempotency-Key"
# Most bytes of kept answers. The oldest are dropped, and their tasks wait for their leases.
MOST_BYTES = 32 * 1024 * 1024
# Most workers and types.
MOST = 10_000


@dataclass(slots=True, eq=False)
class HoldAnswer:
    """The answer to one request.

    Attributes:
        place: the worker and the type.
        key: of the request; None is never repeated.
        asked_again: the worker has repeated the request, so it does not read this answer.
        claimed: the tasks in it; None before it has any, and when they were taken from it.
        size: bytes.
    """

    place: tuple[str, str]
    key: str | None
    asked_again: bool = False
    claimed: ClaimedTasks | None = None
    size: int = 0

    def take(self) -> ClaimedTasks | None:
        """The tasks, for the one who delivers or returns them."""
        taken, self.claimed = self.claimed, None
        return taken


class HoldAnswers:
    """The last answer to each worker and type.

    Args:
        most: answers that are kept.
        most_bytes: bytes that are kept.
    """

    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], HoldAnswer] = OrderedDict()
        self._bytes = 0

    def asked(self, worker: str, type_name: str, key: str | None) -> tuple[HoldAnswer, ClaimedTasks | None]:
        """A request has come: its answer, and the tasks of the answer that it repeats.

        A request with another key shows that its worker has the answer before.
        """
        answer = HoldAnswer((worker, type_name), key)
        before = self._kept.get(answer.place)
        if before is not None:
            self._drop(before)
        if key is None:
            return answer, None
        self._kept[answer.place] = answer
        if before is None or before.key != key:
            self._limit()
            return answer, None
        before.asked_again = True
        return answer, before.take()

    def keep(self, answer: HoldAnswer, claimed: ClaimedTasks, size: int) -> None:
        """Keeps the tasks of an answer until the next request of its worker for the type."""
        answer.claimed = claimed
        if self._kept.get(answer.place) is answer:
            answer.size = size
            self._bytes += size
            self._limit()

    def _limit(self) -> None:
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, answer: HoldAnswer) -> None:
        del self._kept[answer.place]
        self._bytes -= answer.size


@dataclass(frozen=True, slots=True)
class UnconfirmedTasks:
    """Claimed tasks that their workers may not have received.

    The process keeps them while its gateway begins again: the outage that made it begin again
    often lost the answers.

    Attributes:
        answers: the last answers.
        undelivered: workers and tasks that are not returned yet.
    """

    answers: HoldAnswers = field(default_factory=HoldAnswers)
    undelivered: list[tuple[str, Sequence[ReadyTask]]] = field(default_factory=list)


def repeatable(lost: ClaimedTasks | None, most: int, now_s: float) -> tuple[ClaimedTasks, list[ReadyTask]]:
    """The tasks of a lost answer for its repetition, and those to return.

    Args:
        lost: the lost answer; None without one.
        most: tasks of the repetition: the worker may have less room than before.
        now_s: on the loop's clock. A task whose lease is half over is returned: the worker could
            not renew it in time.
    """
    if lost is None:
        return ClaimedTasks.none(), []
    age_ms = (now_s - lost.claimed_s) * 1000
    again = [task for task in lost.tasks if age_ms * 2 < task.lease_ms][:most]
    ids = {task.fence.id for task in again}
    return ClaimedTasks(again, lost.claimed_s), [task for task in lost.tasks if task.fence.id not in ids]
