"""Results of several stages of a task in one batch, from a worker that went on by itself.

Pure: no I/O, no clock. When in doubt each result is judged by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest

from penstock.contracts.result import StageResult
from penstock.core.completion import Fence, Outcome

# The attempts of a chain, at least one, in the order of their steps.
Chain = tuple[Fence, ...]
# A result with the worker that reported it.
Reported = tuple[str, StageResult]

# Others need the counts of failures of their stage, or begin a flow.
_CHAINED = frozenset({Outcome.NEXT, Outcome.DONE})


def in_rounds(results: Mapping[Fence, Reported]) -> list[list[Chain]]:
    """The attempts as chains, in rounds of at most one chain of each task, in the order of steps.

    A chain takes effect in one statement; a statement moves a task once. A later chain waits while
    an earlier one of its task does.
    """
    of_task: defaultdict[int, list[Fence]] = defaultdict(list)
    for fence in results:
        of_task[fence.id].append(fence)
    chains = [_chains(fences, results) for fences in of_task.values()]
    return [[chain for chain in one_round if chain] for one_round in zip_longest(*chains)]


def one_by_one(chains: list[Chain]) -> list[list[Chain]]:
    """Rounds of single attempts of some chains."""
    return [[(fence,) for fence in one_round if fence] for one_round in zip_longest(*chains)]


def _chains(fences: list[Fence], results: Mapping[Fence, Reported]) -> list[Chain]:
    if len(fences) == 1:
        return [tuple(fences)]
    chains: list[list[Fence]] = []
    for fence in sorted(fences):
        if chains and _follows(fence, chains[-1][-1], results):
            chains[-1].append(fence)
        else:
            chains.append([fence])
    return [tuple(chain) for chain in chains]


def _follows(fence: Fence, before: Fence, results: Mapping[Fence, Reported]) -> bool:
    worker, result = results[before]
    its_worker, its_result = results[fence]
    return (
        result.goes_on is not None
        and result.outcome is Outcome.NEXT
        and result.delay_ms is None
        and fence == Fence(before.id, before.step + 1, result.next_stage or "", result.goes_on)
        and its_worker == worker
        and its_result.outcome in _CHAINED
        and its_result.delay_ms is None
    )
