"""The steps of a schema upgrade: `pre` before new services start, `post` after old ones end.

A migration `0042_name.sql` adds or replaces objects, so that old and new code can use the schema;
it belongs to `pre`. A migration `0043_name.post.sql` removes objects that only old code needs; it
belongs to `post`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from penstock.errors import CannotStart


class Step(Enum):
    """A step of an upgrade."""

    PRE = "pre"
    POST = "post"


def step_of(name: str) -> Step:
    """Returns the step of a migration, by its name without `.sql`."""
    return Step.POST if name.endswith(".post") else Step.PRE


def expected(names: Sequence[str]) -> list[str]:
    """Returns the migrations, out of all, that a version's services require, in order."""
    return [name for name in names if step_of(name) is Step.PRE]


def due(names: Sequence[str], done: Collection[str], step: Step | None) -> list[str]:
    """Returns the migrations to apply now, in order.

    Args:
        names: all migrations of the release, in order.
        done: the migrations that have been applied.
        step: the step; None is both, which requires that no service of an older version runs. For
            an empty database `pre` is both steps, since no older service can use it.

    Raises:
        CannotStart: another step must run first.
    """
    if not done and step is Step.PRE:
        step = None
    left = [name for name in names if name not in done]
    steps = [step_of(name) for name in left]
    if step is Step.PRE and Step.PRE in steps:
        last = len(steps) - 1 - steps[::-1].index(Step.PRE)
        if Step.POST in steps[:last]:
            early = left[steps.index(Step.POST)]
            raise CannotStart(
                f"{early} removes objects that an earlier release needs, and has not been applied: finish the upgrade to that "
                "release first (`penstock migrate --step post` of that release), or stop all services and run `penstock migrate`"
            )
    if step is Step.POST and Step.PRE in steps:
        early = left[steps.index(Step.PRE)]
        raise CannotStart(f"{early} has not been applied: run `penstock migrate --step pre` first")
    return [name for name in left if step is None or step_of(name) is step]
