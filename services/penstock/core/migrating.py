"""Which migrations are applied before a release's services start, and which once those of the release before are gone.

`0042_name.sql` only adds, so that old and new code run on it side by side: it belongs to the step before (`pre`).
`0043_name.post.sql` takes away what only old code needs (`post`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from penstock.errors import CannotStart


class Step(Enum):
    """Of an upgrade."""

    PRE = "pre"
    POST = "post"


def step_of(name: str) -> Step:
    """To which step a migration belongs, by its name without `.sql`."""
    return Step.POST if name.endswith(".post") else Step.PRE


def expected(names: Sequence[str]) -> list[str]:
    """Of all migrations of a release, in order, those without which its services cannot work."""
    return [name for name in names if step_of(name) is Step.PRE]


def due(names: Sequence[str], done: Collection[str], step: Step | None) -> list[str]:
    """Which migrations to apply now, in order.

    Args:
        names: of all there are, in order.
        done: those that have been applied.
        step: None is both, with no services running meanwhile but of this release. A database without any migration has no
            services that need what another step takes away: the first step is then both.

    Raises:
        CannotStart: the step cannot be taken before another.
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
                f"{early} takes away what an earlier release needs, and has not been applied: finish the upgrade to that "
                "release first (`penstock migrate --step post` of that release), or stop all services and run `penstock migrate`"
            )
    if step is Step.POST and Step.PRE in steps:
        early = left[steps.index(Step.PRE)]
        raise CannotStart(f"{early} has not been applied: run `penstock migrate --step pre` first")
    return [name for name in left if step is None or step_of(name) is step]
