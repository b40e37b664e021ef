"""What type checkers infer for handlers (run by `tests/unit/worker/test_typing.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

from penstock.worker import Done, Next, Outcome, Task, Worker


@dataclass
class Video:
    file: str
    seconds: float


class Order(TypedDict):
    item: str


worker = Worker()


@worker.stage("media.probe")
async def probe(task: Task[Video]) -> Next | Done:
    assert_type(task.context, Video)
    assert_type(task.context.seconds, float)
    task.progress(0.4, "frame 1,200 of 3,000")
    return Next("transcode", task.context)


@worker.stage("order.reserve")
def reserve(task: Task[Order]) -> Outcome:
    assert_type(task.context["item"], str)
    task.context["nothing"]  # type: ignore[typeddict-item]  # the checker knows the keys
    return Done()


@worker.stage("order.ship")
def ship(task: Task) -> Outcome:
    assert_type(task.context, Any)
    return Done()


# The decorator leaves the handler as it is.
assert_type(reserve(Task(1, "order", "reserve", 0, 0, 0, Order(item="tea"))), Outcome)
