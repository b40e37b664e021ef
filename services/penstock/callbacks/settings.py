"""Settings of the callbacks service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.core.addresses import Network, parse_networks
from penstock.core.delivery import DeliveryPolicy
from penstock.core.drain import DrainPolicy
from penstock.core.health import HealthPolicy
from penstock.core.webhook_secrets import secret_problem
from penstock.kafka.processing.processor import ProcessorSettings
from penstock.settings import Metered, Platform, Sealing, Sweeping, option

_DELIVERY = DeliveryPolicy()
_HEALTH = HealthPolicy()
_DRAIN = DrainPolicy()
_COUNTS = (
    "callback_target_slots",
    "callback_host_slots",
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
LEAST_FORGET_S = 60.0
# Callbacks that wait for their turn are held, too.
LEAST_HELD_MAX_S = 60.0
_GENERATOR = "python -c \"import base64, secrets; print('whsec_' + base64.b64encode(secrets.token_bytes(32)).decode())\""
_NO_SECRET = (
    "callback_secrets is empty: set PENSTOCK_CALLBACK_SECRETS to one or more secrets, comma-separated; "
    f"create one with: {_GENERATOR}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBounds:
    """The bounds of the lanes of one path.

    Attributes:
        slots: most calls under way.
        target_slots: most calls under way to one target. A quick target holds further slots for
            attempts claimed ahead.
        host_slots: most slots of a trusted host.
        untrusted_slots: most slots of another host.
        server_slots: most slots of all untrusted hosts of one server.
        suspect_slots: most calls under way to all suspect targets together.
        lane_size: most callbacks that wait in one lane.
        total_size: when more callbacks wait in all lanes together, each lane keeps no more than its
            share.
        longest_wait_s: a callback that would wait longer leaves its lane.
    """

    slots: int
    target_slots: int
    host_slots: int
    untrusted_slots: int
    server_slots: int
    suspect_slots: int
    lane_size: int
    total_size: int
    longest_wait_s: float


# Fields of policies, with the settings that have their values.
_HEALTH_SETTINGS = {
    "slow_s": "callback_slow_s",
    "threshold": "callback_abnormal_count",
    "ceiling": "callback_abnormal_ceiling",
    "calm_s": "callback_calm_s",
    "by_timer": "callback_count_early",
    "share": "callback_abnormal_share",
    "decay_s": "callback_decay_s",
    "self_check_share": "callback_suspicion_share",
}
_DRAIN_SETTINGS = {
    "rate": "callback_drain_rate",
    "probe_s": "callback_probe_s",
    "probe_most_s": "callback_probe_most_s",
}


@dataclass(frozen=True, kw_only=True)
class CallbacksSettings(ProcessorSettings, Sweeping, Platform, Metered, Sealing):
    """The settings of the callbacks service; the base classes have those of several services."""

    # Without repr, since logs and tracebacks contain settings.
    callback_secrets: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "doc": "Secrets that sign the callbacks of targets and namespaces without a secret of their own, comma-separated, "
            "each whsec_ followed by base64. During a rotation every secret signs."
        },
    )
    callback_secrets_dir: str = option(
        "",
        "Folder of the files that secrets by reference (`file:NAME`) name. The service reads a changed file within seconds.",
    )
    callback_allow: tuple[str, ...] = option(
        (),
        "Non-public networks that may be called, comma-separated, such as 10.1.0.0/16 or fd12::/48.",
    )
    callback_schedule_s: tuple[str, ...] = option(
        tuple(f"{delay:g}" for delay in _DELIVERY.schedule_s),
        "Delays between the attempts of a callback in seconds, comma-separated; attempts are one more than delays.",
    )
    callback_jitter: float = option(
        _DELIVERY.jitter, "Random share of each delay between attempts, from 0 to 1."
    )
    callback_retry_after_max_s: float = option(
        _DELIVERY.retry_after_max_s, "Maximum seconds of a target's Retry-After that are honoured."
    )
    callback_timeout_s: float = option(
        10.0, "Seconds that a call may take, from connecting until the end of the response."
    )
    callback_slots: int = option(500, "Maximum number of concurrent calls on the normal path.")
    callback_target_slots: int = option(
        8, "Maximum number of concurrent calls to one target on the normal path."
    )
    callback_host_slots: int = option(
        200,
        "Maximum number of concurrent calls to one host (scheme, name and port) on the normal path; until the host answers "
        "in time, twice callback_target_slots.",
    )
    callback_slow_slots: int = option(
        200, "Maximum number of concurrent slow calls, which occupy no slot of the normal path."
    )
    callback_slow_target_slots: int = option(8, "Maximum number of concurrent slow calls to one target.")
    callback_diverted_slots: int = option(
        5, "Maximum number of concurrent calls on the diverted path, which has retries and abnormal targets."
    )
    callback_diverted_target_slots: int = option(
        1, "Maximum number of concurrent calls to one target on the diverted path."
    )
    callback_waiting: int = option(5_000, "Maximum number of callbacks that wait in memory for one target.")
    callback_in_hand: int = option(
        20_000,
        "Maximum number of callbacks that wait in memory on one path; at this number consumption pauses. From half of it "
        "(diverted path: a quarter) each target is limited to its share.",
    )
    callback_patience_s: float = option(
        10.0,
        "Seconds that a callback waits in memory for its target before it is held in PostgreSQL.",
    )
    callback_postpone_s: float = option(
        30.0, "Maximum seconds until a postponed callback is published again."
    )
    callback_horizon_s: float = option(
        30.0,
        "Seconds after which an attempt without a recorded outcome (after a crash) is repeated.",
    )
    callback_republish_s: float = option(
        60.0, "Seconds after which a published callback that no process has started is published again."
    )
    callback_rate: float = option(
        0.0, "Maximum calls per second to one target without its own rate; 0 is unlimited."
    )
    callback_forget_s: float = option(
        604_800.0,
        "Seconds without a call after which a target is deleted, if it is normal with count 0 or has answered 410, and has "
        "neither a rate of its own nor held callbacks.",
    )
    callback_held_max_s: float = option(
        604_800.0,
        "Seconds after which a held callback becomes a dead letter, which can be replayed.",
    )
    callback_slow_s: float = option(_HEALTH.slow_s, "Seconds after which a call counts as slow.")
    callback_abnormal_count: int = option(
        _HEALTH.threshold,
        "Count of slow calls at which a target becomes abnormal, so that its callbacks are diverted.",
    )
    callback_abnormal_ceiling: int = option(_HEALTH.ceiling, "Maximum count of slow calls of a target.")
    callback_calm_s: float = option(
        _HEALTH.calm_s, "Seconds after a slow call in which quick calls do not decrement the count."
    )
    callback_count_early: bool = option(
        _HEALTH.by_timer,
        "Whether a slow call counts as soon as it is slow (true), or at its end (false).",
    )
    callback_abnormal_share: float = option(
        _HEALTH.share,
        "Minimum share of slow calls among a target's recent calls to make it abnormal; 0 turns this off.",
    )
    callback_decay_s: float = option(
        _HEALTH.decay_s,
        "Seconds after which the count of an abnormal target without calls drops by one; 0 turns this off.",
    )
    callback_suspicion_share: float = option(
        _HEALTH.self_check_share,
        "Share of all hosts, and of those of the other namespaces (and at least ten servers), that must become abnormal within "
        "30 s to start self-check mode, in which no slow call counts; 0 turns this off.",
    )
    callback_drain_rate: float = option(
        _DRAIN.rate,
        "Held callbacks per second that are requeued for one recovering target, and its calls per second on the diverted path.",
    )
    callback_probe_s: float = option(
        _DRAIN.probe_s,
        "Seconds between the first probes of an abnormal target; the delay doubles with each failed probe.",
    )
    callback_probe_most_s: float = option(
        _DRAIN.probe_most_s, "Maximum seconds between two probes of an abnormal target."
    )

    @cached_property
    def health(self) -> HealthPolicy:
        """The policy that decides when a target is abnormal."""
        return HealthPolicy(
            slow_s=self.callback_slow_s,
            threshold=self.callback_abnormal_count,
            ceiling=self.callback_abnormal_ceiling,
            calm_s=self.callback_calm_s,
            by_timer=self.callback_count_early,
            share=self.callback_abnormal_share,
            decay_s=self.callback_decay_s,
            self_check_share=self.callback_suspicion_share,
        )

    @cached_property
    def drain(self) -> DrainPolicy:
        """The policy that decides how fast held callbacks are drained."""
        return DrainPolicy(
            rate=self.callback_drain_rate,
            probe_s=self.callback_probe_s,
            probe_most_s=self.callback_probe_most_s,
        )

    @cached_property
    def lane_bounds(self) -> LaneBounds:
        """The bounds of the normal path."""
        return LaneBounds(
            slots=self.callback_slots,
            target_slots=self.callback_target_slots,
            host_slots=self.callback_host_slots,
            untrusted_slots=2 * self.callback_target_slots,
            server_slots=max(2 * self.callback_target_slots, self.callback_slots // 8),
            suspect_slots=max(1, self.callback_slots // 2),
            lane_size=self.callback_waiting,
            total_size=self.callback_in_hand // 2,
            longest_wait_s=self.callback_patience_s,
        )

    @cached_property
    def diverted_lane_bounds(self) -> LaneBounds:
        """The bounds of the diverted path."""
        slots = self.callback_diverted_slots
        return LaneBounds(
            slots=slots,
            target_slots=min(self.callback_diverted_target_slots, slots),
            # Two slots stay free for targets that respond, such as a recovering one.
            host_slots=max(1, slots - 2),
            untrusted_slots=min(2 * self.callback_diverted_target_slots, slots),
            server_slots=max(1, slots - 2),
            suspect_slots=max(1, slots - 2),
            lane_size=self.callback_waiting,
            total_size=self.callback_in_hand // 4,
            longest_wait_s=self.callback_patience_s,
        )

    @property
    def slow_host_slots(self) -> int:
        """Most calls to one host in the slow pool."""
        return max(self.callback_slow_target_slots, self.callback_slow_slots // 8)

    @property
    def slow_server_slots(self) -> int:
        """Most calls to one server in the slow pool."""
        return max(self.callback_slow_target_slots, self.callback_slow_slots // 4)

    @cached_property
    def policy(self) -> DeliveryPolicy:
        """The schedule of attempts.

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
        """The non-public networks that may be called.

        Raises:
            ValueError: an entry is not a network.
        """
        return parse_networks(self.callback_allow)

    def validate(self) -> list[str]:
        """Secrets are required; a running attempt must not look like a lost one."""
        problems = super().validate()
        problems += self._secret_problems()
        problems += self._network_problems()
        try:
            problems += [f"callback_{problem}" for problem in self.policy.problems()]
        except ValueError:
            problems.append(
                f"callback_schedule_s={','.join(self.callback_schedule_s)!r} must be seconds, comma-separated"
            )
        problems += [_of_setting(problem, _HEALTH_SETTINGS) for problem in self.health.problems()]
        problems += [_of_setting(problem, _DRAIN_SETTINGS) for problem in self.drain.problems()]
        problems += [
            f"{name}={getattr(self, name)} must be at least 1" for name in _COUNTS if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be above 0"
            # `not … >` rather than `<=`, so that NaN is a problem too.
            for name in _DURATIONS
            if not getattr(self, name) > 0
        ]
        # A shorter time could delete a target whose last call is not recorded yet.
        if not LEAST_FORGET_S <= self.callback_forget_s < float("inf"):
            problems.append(f"callback_forget_s={self.callback_forget_s} must be at least {LEAST_FORGET_S:g}")
        if not LEAST_HELD_MAX_S <= self.callback_held_max_s < float("inf"):
            problems.append(
                f"callback_held_max_s={self.callback_held_max_s} must be at least {LEAST_HELD_MAX_S:g}"
            )
        if not 0 <= self.callback_rate < float("inf"):
            problems.append(f"callback_rate={self.callback_rate} must not be negative")
        problems += [
            f"{larger}={getattr(self, larger)} must be at least {times or ''}{smaller}={getattr(self, smaller)}"
            for larger, times, smaller in (
                ("callback_horizon_s", "twice ", "callback_timeout_s"),
                # Records are acknowledged in order, so a waiting one delays all later ones of its
                # partition.
                ("stall_timeout_s", "twice ", "callback_patience_s"),
                ("callback_slots", "", "callback_target_slots"),
                ("callback_host_slots", "", "callback_target_slots"),
                ("callback_diverted_slots", "", "callback_diverted_target_slots"),
                ("callback_in_hand", "", "callback_slots"),
            )
            if getattr(self, larger) < (2 if times else 1) * getattr(self, smaller)
        ]
        return problems

    def _secret_problems(self) -> list[str]:
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


def _of_setting(problem: str, settings: Mapping[str, str]) -> str:
    """The problem of a policy with the settings in place of the policy's fields."""
    return re.sub(rf"(?<![\w=])({'|'.join(settings)})(?==)", lambda match: settings[match[0]], problem)
