"""Keys take turns, and each keeps its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.round_robin import RoundRobin


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=60))
def test_keys_take_turns_and_keep_their_order(steps: list[str | None]) -> None:
    """A letter adds an item of that key, and None removes one. A key that waits is served before
    any other key is served twice."""
    queue: RoundRobin[tuple[str, int]] = RoundRobin(lambda item: item[0])
    waiting: dict[str, list[int]] = {}
    overtaken: dict[str, set[str]] = {}
    for number, step in enumerate(steps):
        if step is not None:
            queue.append((step, number))
            waiting.setdefault(step, []).append(number)
            overtaken.setdefault(step, set())
        elif waiting:
            first = queue.first
            key, item = queue.popleft()
            assert first == (key, item)
            assert item == waiting[key].pop(0)
            overtaken.pop(key)
            for others in overtaken.values():
                assert key not in others
                others.add(key)
            if waiting[key]:
                overtaken[key] = set()
            else:
                del waiting[key]
        assert bool(queue) == bool(waiting)
