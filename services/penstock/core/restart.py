"""When to start a process again that has ended: at once the first time, ever later while it keeps failing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patiently a process that dies is started again.

    Attributes:
        first_s: delay before the first restart, in seconds.
        factor: each further delay is this much longer.
        longest_s: no delay is longer, in seconds.
        steady_s: a process that ran this long, in seconds, has recovered: the count starts anew.
    """

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    steady_s: float = 20.0


@dataclass(frozen=True, slots=True)
class RestartState:
    """How often in a row a process has ended without having run steadily in between."""

    failures: int = 0


def after_exit(
    policy: RestartPolicy, state: RestartState, *, started_at: float, now: float
) -> tuple[RestartState, float]:
    """What follows from a process having ended at `now`.

    Args:
        policy: the delays.
        state: what `after_exit` returned last, or a new `RestartState`.
        started_at: when the process was started, on the clock of `now`, in seconds.
        now: when it ended.

    Returns:
        The state to keep, and the seconds to wait before starting the process again.
    """
    failures = 1 if now - started_at >= policy.steady_s else state.failures + 1
    # The exponent is bounded so that a process failing for weeks does not overflow a float.
    delay = min(policy.longest_s, policy.first_s * policy.factor ** min(failures - 1, 64))
    return RestartState(failures), delay
