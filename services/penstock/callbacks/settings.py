"""Settings of the callbacks service."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from penstock.callbacks.signing import secret_problem
from penstock.core.delivery import DeliveryPolicy
from penstock.kafka.processor import ProcessorSettings
from penstock.settings import Platform, option

_DEFAULT = DeliveryPolicy()
_HOW_TO_MAKE_ONE = "python -c \"import base64, secrets; print('whsec_' + base64.b64encode(secrets.token_bytes(32)).decode())\""


@dataclass(frozen=True, kw_only=True)
class CallbacksSettings(ProcessorSettings, Platform):
    """See `Platform` and `ProcessorSettings` for what it shares with others."""

    # Never in a repr: settings end up in logs and tracebacks.
    callback_secrets: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "doc": "Secrets that sign callbacks, comma-separated, each whsec_ and base64; with several, while they "
            "are rotated, each signs."
        },
    )
    callback_schedule_s: tuple[str, ...] = option(
        tuple(f"{delay:g}" for delay in _DEFAULT.schedule_s),
        "Seconds between attempts, comma-separated; there is one attempt more than delays.",
    )
    callback_jitter: float = option(
        _DEFAULT.jitter, "Share of a delay between attempts that is random, 0 to 1."
    )
    callback_retry_after_max_s: float = option(
        _DEFAULT.retry_after_max_s, "Most seconds for which a target's Retry-After is honoured."
    )
    callback_timeout_s: float = option(
        10.0, "Seconds a call may take, from connecting to the end of the answer."
    )
    callback_slots: int = option(500, "Most calls under way at once.")
    callback_target_slots: int = option(8, "Most calls under way at once to one target.")
    callback_patience_s: float = option(
        10.0,
        "Seconds for which a callback is kept waiting for its target's turn before it goes back to PostgreSQL.",
    )
    callback_postpone_s: float = option(30.0, "Seconds after which a callback that went back comes again.")
    callback_horizon_s: float = option(
        30.0,
        "Seconds after which an attempt whose fate is unknown, as after a crash, is followed by another.",
    )
    callback_republish_s: float = option(
        60.0, "Seconds after which a record that was written and not begun is written again."
    )

    @cached_property
    def policy(self) -> DeliveryPolicy:
        """How often and how patiently a target is called.

        Raises:
            ValueError: a delay is not a number.
        """
        return DeliveryPolicy(
            schedule_s=tuple(float(delay) for delay in self.callback_schedule_s),
            jitter=self.callback_jitter,
            retry_after_max_s=self.callback_retry_after_max_s,
        )

    def validate(self) -> list[str]:
        """Unsigned callbacks are not sent; an attempt under way must not be taken for a lost one."""
        problems = super().validate()
        if not self.callback_secrets:
            problems.append(
                "callback_secrets is empty: set PENSTOCK_CALLBACK_SECRETS to one or more secrets, comma-separated; "
                f"this makes one: {_HOW_TO_MAKE_ONE}"
            )
        for number, secret in enumerate(self.callback_secrets, 1):
            if problem := secret_problem(secret):
                problems.append(f"callback_secrets: number {number} {problem}")
        try:
            problems += [f"callback_{problem}" for problem in self.policy.problems()]
        except ValueError:
            problems.append(
                f"callback_schedule_s={','.join(self.callback_schedule_s)!r} must be seconds, comma-separated"
            )
        if self.callback_timeout_s <= 0:
            problems.append(f"callback_timeout_s={self.callback_timeout_s} must be above 0")
        if self.callback_horizon_s < 2 * self.callback_timeout_s:
            problems.append(
                f"callback_horizon_s={self.callback_horizon_s} must be at least twice "
                f"callback_timeout_s={self.callback_timeout_s}"
            )
        # Records are acknowledged in order: a call holds back those behind it for as long as it takes.
        if self.stall_timeout_s < 2 * self.callback_timeout_s:
            problems.append(
                f"stall_timeout_s={self.stall_timeout_s} must be at least twice "
                f"callback_timeout_s={self.callback_timeout_s}"
            )
        if not 1 <= self.callback_target_slots <= self.callback_slots:
            problems.append(
                f"callback_target_slots={self.callback_target_slots} must be from 1 to "
                f"callback_slots={self.callback_slots}"
            )
        if self.callback_slots > self.max_in_flight:
            problems.append(
                f"callback_slots={self.callback_slots} must not be above max_in_flight={self.max_in_flight}"
            )
        problems.extend(
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("callback_patience_s", "callback_postpone_s", "callback_republish_s")
            if getattr(self, name) <= 0
        )
        return problems
