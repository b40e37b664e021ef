"""What a gate lets wait on its ready topic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import metrics
from penstock.core.window import Window, WindowPolicy
from penstock.postgres import release
from penstock.postgres.types import TaskType
from penstock.task_sync.figures import samples
from penstock.task_sync.gates import Gate, Looking


def test_limits_and_pauses_are_metrics() -> None:
    """S5: what a type may have is told beside what it has; a limit that it has not is not told."""

    def told(task_type: TaskType) -> dict[tuple[str, ...], float]:
        gate = Gate(task_type, "ready.t", Window(WindowPolicy(100, 1_000)))
        found = samples(cast(Any, SimpleNamespace(gates=lambda: [gate])))
        return {one.labels: one.value for one in found if one.metric in (metrics.LIMIT, metrics.PAUSED)}

    assert told(TaskType(name="t")) == {("t",): 0}
    limited = TaskType(name="t", max_in_flight=5, starts_per_s=2.5, max_per_key=1, paused=True)
    assert told(limited) == {
        ("t",): 1,
        ("t", "in_flight"): 5,
        ("t", "starts_per_s"): 2.5,
        ("t", "per_key"): 1,
    }


async def test_a_rate_caps_the_window_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2, S5: of a type with a rate no more than a second's starts may wait, its metrics tell that, and the little that is
    left of them is no hunger; a rate above the window changes nothing."""

    async def nothing(*_arguments: Any) -> set[Any]:
        return set()

    monkeypatch.setattr(Looking, "look", nothing)
    monkeypatch.setattr(release, "under_way", nothing)
    looking = Looking(cast(Any, None), cast(Any, None), cast(Any, None))
    gate = Gate(TaskType(name="t", starts_per_s=19.5), "ready.t", Window(WindowPolicy(100, 1_000)), written=1)

    def told() -> tuple[float, str]:
        found = samples(cast(Any, SimpleNamespace(gates=lambda: [gate])))
        return next((one.value, one.labels[1]) for one in found if one.metric is metrics.WINDOW_SIZE)

    await looking.look_at_full([gate])
    assert told() == (20, "rate") == gate.sized()
    gate.type = TaskType(name="t", starts_per_s=200)
    assert told() == (100, "floor") == gate.sized(), "nobody was hungry"
    await looking.look_at_full([gate])
    assert told() == (200, "hunger")
