"""Settings of the callbacks service."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from penstock.callbacks.lanes import Room
from penstock.callbacks.signing import secret_problem
from penstock.core.addresses import Network, parse_networks
from penstock.core.delivery import DeliveryPolicy
from penstock.core.drain import DrainPolicy
from penstock.core.health import HealthPolicy
from penstock.kafka.processor import ProcessorSettings
from penstock.settings import Metered, Platform, option

_DEFAULT = DeliveryPolicy()
_HEALTH = HealthPolicy()
_DRAIN = DrainPolicy()
_COUNTS = (
    "callback_target_slots",
    "callback_slow_slots",
    "callback_slow_target_slots",
    "callback_diverted_target_slots",
    "callback_waiting",
)
_DURATIONS = (
    "callback_timeout_s",
    "callback_patience_s",
    "callback_postpone_s",
    "callback_republish_s",
)
SHORTEST_MEMORY_S = 60.0
_HOW_TO_MAKE_ONE = "python -c \"import base64, secrets; print('whsec_' + base64.b64encode(secrets.token_bytes(32)).decode())\""
_NO_SECRET = (
    "callback_secrets is empty: set PENSTOCK_CALLBACK_SECRETS to one or more secrets, comma-separated; "
    f"this makes one: {_HOW_TO_MAKE_ONE}"
)


@dataclass(frozen=True, kw_only=True)
class CallbacksSettings(ProcessorSettings, Platform, Metered):
    """See `Platform`, `ProcessorSettings` and `Metered` for what it shares with others."""

    # Never in a repr: settings end up in logs and tracebacks.
    callback_secrets: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "doc": "Secrets that sign callbacks, comma-separated, each whsec_ and base64; with several, while they "
            "are rotated, each signs."
        },
    )
    callback_allow: tuple[str, ...] = option(
        (),
        "Networks that may be called although they are not public, comma-separated, as 10.1.0.0/16 or fd12::/48.",
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
    callback_slow_slots: int = option(
        200, "Most calls under way that have turned out slow; they hold none of the slots above."
    )
    callback_slow_target_slots: int = option(8, "Most of these to one target.")
    callback_diverted_slots: int = option(
        5, "Most calls under way at once on the diverted path: retries, and targets that are abnormal."
    )
    callback_diverted_target_slots: int = option(1, "Most of these to one target.")
    callback_waiting: int = option(5_000, "Most callbacks that are kept waiting for one target's turn.")
    callback_in_hand: int = option(
        20_000,
        "Most callbacks that wait on one path, for all targets; nothing more is taken beyond. From half of it on "
        "(diverted: a quarter) each target keeps no more than its share.",
    )
    callback_patience_s: float = option(
        10.0,
        "Seconds for which a callback is kept waiting for its target's turn before it goes back to PostgreSQL.",
    )
    callback_postpone_s: float = option(
        30.0, "Most seconds after which a callback that went back comes again."
    )
    callback_horizon_s: float = option(
        30.0,
        "Seconds after which an attempt whose fate is unknown, as after a crash, is followed by another.",
    )
    callback_republish_s: float = option(
        60.0, "Seconds after which a record that was written and not begun is written again."
    )
    callback_rate: float = option(
        0.0, "Most calls a second to one target, unless it has a rate of its own; 0 for any number."
    )
    callback_forget_s: float = option(
        604_800.0,
        "Seconds after its last call for which a target is kept that is normal, charged with nothing and has no "
        "rate of its own.",
    )
    callback_slow_s: float = option(_HEALTH.slow_s, "Seconds after which a call is slow.")
    callback_abnormal_count: int = option(
        _HEALTH.threshold, "Slow calls that make a target abnormal: its callbacks are diverted."
    )
    callback_abnormal_ceiling: int = option(_HEALTH.ceiling, "Most slow calls a target is charged with.")
    callback_calm_s: float = option(
        _HEALTH.calm_s, "Seconds after a slow call for which quick ones take nothing off the count."
    )
    callback_count_early: bool = option(
        _HEALTH.by_timer,
        "Whether a call is counted as slow while it is under way, or only when it has ended.",
    )
    callback_abnormal_share: float = option(
        _HEALTH.share,
        "Least share of a target's recent calls that must be slow to make it abnormal; 0 for any.",
    )
    callback_decay_s: float = option(
        _HEALTH.decay_s,
        "Seconds in which an abnormal target that nobody calls loses one of its count; 0 for never.",
    )
    callback_suspicion_share: float = option(
        _HEALTH.suspicion_share,
        "When more than this share of all addresses (and at least ten) becomes abnormal within 30 s, nothing is "
        "charged to any; 0 turns this off.",
    )
    callback_drain_rate: float = option(
        _DRAIN.rate,
        "Callbacks a second that are let go to one target of what was held for it, and calls a second on the diverted path meanwhile.",
    )
    callback_probe_s: float = option(
        _DRAIN.probe_s, "Seconds between the first calls that probe a target which hangs; the wait doubles."
    )
    callback_probe_most_s: float = option(_DRAIN.probe_most_s, "Most seconds between such calls.")

    @cached_property
    def health(self) -> HealthPolicy:
        """When a target is abnormal."""
        return HealthPolicy(
            slow_s=self.callback_slow_s,
            threshold=self.callback_abnormal_count,
            ceiling=self.callback_abnormal_ceiling,
            calm_s=self.callback_calm_s,
            by_timer=self.callback_count_early,
            share=self.callback_abnormal_share,
            decay_s=self.callback_decay_s,
            suspicion_share=self.callback_suspicion_share,
        )

    @cached_property
    def drain(self) -> DrainPolicy:
        """How fast what was held for a target is let go."""
        return DrainPolicy(
            rate=self.callback_drain_rate,
            probe_s=self.callback_probe_s,
            probe_most_s=self.callback_probe_most_s,
        )

    @cached_property
    def room(self) -> Room:
        """The bounds of the normal path."""
        return Room(
            slots=self.callback_slots,
            target_slots=self.callback_target_slots,
            doubtful_slots=max(1, self.callback_slots // 2),
            waiting=self.callback_waiting,
            waiting_in_all=self.callback_in_hand // 2,
            patience_s=self.callback_patience_s,
        )

    @cached_property
    def diverted_room(self) -> Room:
        """The bounds of the diverted path."""
        slots = self.callback_diverted_slots
        return Room(
            slots=slots,
            target_slots=min(self.callback_diverted_target_slots, slots),
            # Those who answer, a recovering target among them, always find one.
            doubtful_slots=max(1, slots - 2),
            waiting=self.callback_waiting,
            waiting_in_all=self.callback_in_hand // 4,
            patience_s=self.callback_patience_s,
            # One call at a time to each, and slots for all who answer.
            ahead=False,
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

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """What may be called although it is not public.

        Raises:
            ValueError: one is no network.
        """
        return parse_networks(self.callback_allow)

    def validate(self) -> list[str]:
        """Unsigned callbacks are not sent; an attempt under way must not be taken for a lost one."""
        problems = super().validate()
        problems += self._problems_of_secrets()
        problems += self._network_problems()
        try:
            problems += [f"callback_{problem}" for problem in self.policy.problems()]
        except ValueError:
            problems.append(
                f"callback_schedule_s={','.join(self.callback_schedule_s)!r} must be seconds, comma-separated"
            )
        problems += [f"callback health: {problem}" for problem in self.health.problems()]
        problems += [f"callback drain: {problem}" for problem in self.drain.problems()]
        problems += [
            f"{name}={getattr(self, name)} must be at least 1" for name in _COUNTS if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be above 0"
            # Written so that NaN is refused too.
            for name in _DURATIONS
            if not getattr(self, name) > 0
        ]
        # Sooner, what was called a moment ago and not written down yet would be forgotten.
        if not SHORTEST_MEMORY_S <= self.callback_forget_s < float("inf"):
            problems.append(
                f"callback_forget_s={self.callback_forget_s} must be at least {SHORTEST_MEMORY_S:g}"
            )
        if not 0 <= self.callback_rate < float("inf"):
            problems.append(f"callback_rate={self.callback_rate} must not be negative")
        problems += [
            f"{larger}={getattr(self, larger)} must be at least {times or ''}{smaller}={getattr(self, smaller)}"
            for larger, times, smaller in (
                ("callback_horizon_s", "twice ", "callback_timeout_s"),
                # Records are acknowledged in order: one that waits for its target's turn holds back those behind it.
                ("stall_timeout_s", "twice ", "callback_patience_s"),
                ("callback_slots", "", "callback_target_slots"),
                ("callback_diverted_slots", "", "callback_diverted_target_slots"),
                ("callback_in_hand", "", "callback_slots"),
            )
            if getattr(self, larger) < (2 if times else 1) * getattr(self, smaller)
        ]
        return problems

    def _problems_of_secrets(self) -> list[str]:
        if not self.callback_secrets:
            return [_NO_SECRET]
        return [
            f"callback_secrets: number {number} {problem}"
            for number, secret in enumerate(self.callback_secrets, 1)
            if (problem := secret_problem(secret))
        ]

    def _network_problems(self) -> list[str]:
        try:
            parse_networks(self.callback_allow)
        except ValueError as error:
            return [f"callback_allow={','.join(self.callback_allow)!r}: {error}"]
        return []
