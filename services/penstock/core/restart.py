"""Computes when to restart a process: exponential backoff, reset after a steady run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.retry import Backoff


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays between restarts of a process.

    Attributes:
        first_s: delay before the first restart, in seconds.
        factor: ratio of each further delay to the one before.
        longest_s: upper limit of the delay, in seconds.
        steady_s: a process that ran for this many seconds has recovered, which resets the count.
    """

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    steady_s: float = 20.0


def after_exit(policy: RestartPolicy, failures: int, *, started_at: float, now: float) -> tuple[int, float]:
    """Counts the exit of a process at `now` and computes the delay before its restart.

    Args:
        policy: the delays.
        failures: consecutive failures that the last call returned; 0 at first.
        started_at: when the process was started, on the clock of `now`, in seconds.
        now: when the process ended, in seconds.

    Returns:
        The failures to keep, and the seconds to wait before starting the process again.
    """
    failures = 1 if now - started_at >= policy.steady_s else failures + 1
    backoff = Backoff(policy.first_s, policy.factor, policy.longest_s, jitter=0.0)
    return failures, backoff.delay_s(failures, chance=0.0)
