"""Several results of a task in one batch."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.result import StageResult
from penstock.core.completion import Fence, Outcome
from penstock.stages.chains import Reported, in_rounds, one_by_one

FENCES = st.builds(
    Fence, st.integers(1, 3), st.integers(0, 5), st.sampled_from("ab"), st.sampled_from([0, 1, 1_000])
)
RESULTS = st.dictionaries(
    FENCES,
    st.tuples(
        st.sampled_from(["w", "x"]),
        st.booleans(),
        st.sampled_from(
            [Outcome.NEXT, Outcome.NEXT, Outcome.NEXT, Outcome.DONE, Outcome.FAIL, Outcome.SPAWN]
        ),
        st.sampled_from("ab"),
        st.sampled_from([None, None, 5]),
    ),
)


def reported(given: dict[Fence, tuple[str, bool, Outcome, str, int | None]]) -> dict[Fence, Reported]:
    return {
        fence: (
            worker,
            StageResult(
                fence=fence,
                outcome=outcome,
                next_stage=stage,
                delay_ms=delay_ms,
                goes_on=1_000 if goes_on else None,
            ),
        )
        for fence, (worker, goes_on, outcome, stage, delay_ms) in given.items()
    }


@given(RESULTS.map(reported))
def test_rounds_have_each_task_once_and_in_order(results: dict[Fence, Reported]) -> None:
    """W4: one statement moves a task once, and a later stage after an earlier one."""
    rounds = in_rounds(results)
    assert sorted(fence for each in rounds for chain in each for fence in chain) == sorted(results)
    assert all(len({chain[0].id for chain in each}) == len(each) for each in rounds)
    of_task: dict[int, list[Fence]] = {}
    for each in rounds:
        for chain in each:
            of_task.setdefault(chain[0].id, []).extend(chain)
    assert all(found == sorted(found) for found in of_task.values())
    for each in rounds:
        singles = [fence for one_round in one_by_one(each) for (fence,) in one_round]
        assert sorted(singles) == sorted(fence for chain in each for fence in chain)


@given(RESULTS.map(reported))
def test_a_chain_is_of_one_worker_that_went_on(results: dict[Fence, Reported]) -> None:
    """W4: each attempt of a chain is that with which its worker went on, and only the last one may
    end the task."""
    for chain in [chain for each in in_rounds(results) for chain in each if len(chain) > 1]:
        for before, after in pairwise(chain):
            (worker, result), (its_worker, its_result) = results[before], results[after]
            assert (worker, result.goes_on, result.outcome) == (its_worker, 1_000, Outcome.NEXT)
            assert after == Fence(before.id, before.step + 1, str(result.next_stage), 1_000)
            assert its_result.outcome in (Outcome.NEXT, Outcome.DONE)
            assert (result.delay_ms, its_result.delay_ms) == (None, None)


def test_three_stages_of_a_worker_are_one_chain() -> None:
    """W4: also when the first stage was tried before."""
    fences = [Fence(1, 0, "a", 4), Fence(1, 1, "b", 1_000), Fence(1, 2, "c", 1_000)]
    outcomes = {
        fences[2]: ("w", False, Outcome.DONE, "", None),
        fences[0]: ("w", True, Outcome.NEXT, "b", None),
        fences[1]: ("w", True, Outcome.NEXT, "c", None),
    }
    assert in_rounds(reported(outcomes)) == [[tuple(fences)]]
