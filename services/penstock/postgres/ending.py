"""Attempts that ended, and their columns for the statement that ends them (`advance.advance`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.contracts.result import Failure, StageResult
from penstock.core.completion import Conclusion, Fence, Outcome
from penstock.core.endings import RetryState, conclude_result, stored_state
from penstock.core.task import State
from penstock.postgres.outbox import sparse
from penstock.postgres.tasks import encode_ref


# Not frozen: constructing a frozen dataclass is slower, and one is made for each stage that ends.
@dataclass(slots=True, kw_only=True)
class Ending:
    """An attempt that ended, and where its task goes.

    Attributes:
        fence: the attempt.
        outcome: how it ended.
        conclusion: where the task goes.
        worker: the worker that reported it, or that was lost.
        context: the new context (next), the result (done), or what the task waits for (spawn,
            wait).
        next_stage: the stage after waiting (spawn, wait).
        terms: of waiting (spawn, wait).
        error: why, with fail, retry, handed_back and expired.
        started_ms: when the handler began, milliseconds since 1970.
        finished_ms: when it ended.
        goes_on: number of the attempt of the next stage that the worker runs already
            (`core.going_on`); None when it does not.
        partition: of the heartbeats of that worker.
    """

    fence: Fence
    outcome: Outcome
    conclusion: Conclusion
    worker: str | None
    context: Context | None = None
    next_stage: str | None = None
    terms: Mapping[str, Any] | None = None
    error: Failure | None = None
    started_ms: int = 0
    finished_ms: int = 0
    goes_on: int | None = None
    partition: int | None = None

    @classmethod
    def of(
        cls, worker: str, result: StageResult, state: RetryState | None, chance: Callable[[], float]
    ) -> Ending:
        """The end of an attempt by its result.

        Args:
            worker: that reported it.
            result: of the attempt.
            state: with a result for which `counts_failures` is true.
            chance: random numbers from 0 to 1, for the jitter.
        """
        conclusion = conclude_result(
            result.fence,
            result.outcome,
            state,
            next_stage=result.next_stage,
            delay_s=None if result.delay_ms is None else result.delay_ms / 1000,
            permanent=result.permanent,
            max_attempts=result.max_attempts,
            no_handler=result.no_handler,
            chance=chance,
        )
        return cls(
            fence=result.fence,
            outcome=result.outcome,
            conclusion=conclusion,
            worker=worker,
            context=result.context,
            next_stage=result.next_stage,
            terms=result.terms,
            error=result.error_of(conclusion),
            started_ms=result.started_ms,
            finished_ms=result.finished_ms,
            goes_on=result.goes_on if result.outcome is Outcome.NEXT else None,
        )


def columns_of(
    endings: Sequence[Ending], chains: Mapping[Fence, Sequence[Ending]]
) -> dict[str, list[Any] | None]:
    """The parameters of the statement, from the arguments of `postgres.advance.advance`."""
    conclusions = [e.conclusion for e in endings]
    states = [stored_state(c) for c in conclusions]
    contexts = [e.context for e in endings]
    chained = [chains.get(e.fence, ()) for e in endings]
    # The fence of a chain is that of its first attempt.
    fences = [chain[0].fence if chain else e.fence for e, chain in zip(endings, chained, strict=True)]
    lasts = [e.fence if chain else None for e, chain in zip(endings, chained, strict=True)]
    inputs = [_input_after(chain) for chain in chained]
    return {
        "id": [fence.id for fence in fences],
        "step": [fence.step for fence in fences],
        "stage": [fence.stage for fence in fences],
        "attempt": [fence.attempt for fence in fences],
        "to_state": [state.value for state in states],
        "to_stage": [c.stage for c in conclusions],
        "to_step": [c.step for c in conclusions],
        "to_attempt": [c.attempt for c in conclusions],
        "failures": sparse([c.counts.failures or None for c in conclusions]),
        "losses": sparse([c.counts.losses or None for c in conclusions]),
        # Added to the database's clock, which decides when it is due.
        "delay_s": sparse(
            [
                conclusion.delay_s if state is State.SCHEDULED else None
                for conclusion, state in zip(conclusions, states, strict=True)
            ]
        ),
        "content_type": [c.content_type.value if c else None for c in contexts],
        "context": [c.data if c else None for c in contexts],
        "context_ref": sparse([encode_ref(c.ref) if c else None for c in contexts]),
        "error": sparse([_error(e) if e.error else None for e in endings]),
        "outcome": [e.outcome.value for e in endings],
        "worker": [e.worker for e in endings],
        "started_ms": [e.started_ms or None for e in endings],
        "finished_ms": [e.finished_ms or None for e in endings],
        "goes_on": sparse([e.goes_on for e in endings]),
        "partition": sparse([e.partition for e in endings]),
        "last_step": sparse([last and last.step for last in lasts]),
        "last_stage": sparse([last and last.stage for last in lasts]),
        "last_attempt": sparse([last and last.attempt for last in lasts]),
        **_input_columns("input", inputs),
        **_chain_columns(chained),
    }


def _input_after(chain: Sequence[Ending]) -> Context | None:
    """The context that the last results of a chain leave; None when it is that of the task."""
    return next((e.context for e in reversed(chain) if e.context is not None), None)


def _input_columns(name: str, inputs: Sequence[Context | None]) -> dict[str, list[Any] | None]:
    return {
        f"{name}_type": sparse([c and c.content_type.value for c in inputs]),
        name: sparse([c and c.data for c in inputs]),
        f"{name}_ref": sparse([encode_ref(c.ref) if c else None for c in inputs]),
    }


def _chain_columns(chains: Sequence[Sequence[Ending]]) -> dict[str, list[Any] | None]:
    """The attempts before the last one of each chain."""
    each = [(chain, index, ending) for chain in chains for index, ending in enumerate(chain)]
    columns: dict[str, list[Any] | None] = {
        "chained_id": [e.fence.id for _, _, e in each],
        "chained_step": [e.fence.step for _, _, e in each],
        "chained_stage": [e.fence.stage for _, _, e in each],
        "chained_attempt": [e.fence.attempt for _, _, e in each],
        "chained_started_ms": [e.started_ms or None for _, _, e in each],
        "chained_finished_ms": [e.finished_ms or None for _, _, e in each],
        "chained_is_first": [index == 0 for _, index, _ in each],
        "chained_replaces": [e.context is not None for _, _, e in each],
    }
    return {
        **columns,
        **_input_columns("chained_input", [_input_after(chain[:index]) for chain, index, _ in each]),
    }


def _error(ending: Ending) -> str:
    """The column `error`."""
    assert ending.error is not None
    wire = ending.error.to_wire()
    seconds = ending.conclusion.unhandled_s
    return orjson.dumps({**wire, "unhandled_s": round(seconds, 3)} if seconds else wire).decode()
