"""Settings of the callbacks service."""

from __future__ import annotations

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
# Seconds that a callback waits in memory for its target before it is held in PostgreSQL.
LONGEST_WAIT_S = 10.0
# Most callbacks that wait in memory for one target, and on one path: then consumption pauses.
LANE_SIZE = 5_000
MAX_WAITING = 20_000
# Most slow calls to one target under way, and most calls to one on the diverted path.
SLOW_TARGET_SLOTS = 8
DIVERTED_TARGET_SLOTS = 1
# The ceiling of a target's count, in multiples of the count that makes it abnormal.
_CEILING = 2
# The wait between the first two probes of a target, in multiples of the time that makes a call
# slow. The longest such wait is in multiples of the first one.
PROBE = 5 / 3
_LONGEST_PROBE = 12
# In multiples of the longest call. A running attempt must not look like a lost one, and records
# that wait behind many others must not be published again and again.
HORIZON = 3
REPUBLISH = 6
# Seconds. An outcome may wait for PostgreSQL, and a record for a lane.
LEAST_HORIZON_S = 5.0
LEAST_REPUBLISH_S = 2 * LONGEST_WAIT_S
# Shares of the slots of the normal path.
_HOST_SHARE = 0.4
_SLOW_SHARE = 0.4
GUARDS = ("early", "share", "decay")
# Least values. Callbacks that wait for their turn are held, too, and a target must not be deleted
# before its last call is recorded.
_LEAST = {
    "callback_target_slots": 1,
    "callback_diverted_slots": DIVERTED_TARGET_SLOTS,
    "callback_abnormal_count": 1,
    "callback_calm_s": 0,
    "callback_held_max_s": 60,
}
_ABOVE_0 = (
    "callback_timeout_s",
    "callback_slow_s",
    "callback_drain_rate",
)
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
        unresponsive_slots: most calls under way to all unresponsive targets together.
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
    unresponsive_slots: int
    lane_size: int
    total_size: int
    longest_wait_s: float


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
    callback_timeout_s: float = option(
        10.0, "Seconds that a call may take, from connecting until the end of the response."
    )
    callback_slots: int = option(500, "Maximum number of concurrent calls on the normal path.")
    callback_target_slots: int = option(
        8, "Maximum number of concurrent calls to one target on the normal path."
    )
    callback_diverted_slots: int = option(
        5, "Maximum number of concurrent calls on the diverted path, which has retries and abnormal targets."
    )
    callback_held_max_s: float = option(
        604_800.0,
        "Seconds after which a held callback becomes a dead letter, which can be replayed, and after which an unused target is "
        "deleted. A target with a rate of its own, with held callbacks or disabled by an operator stays.",
    )
    callback_slow_s: float = option(_HEALTH.slow_s, "Seconds after which a call counts as slow.")
    callback_abnormal_count: int = option(
        _HEALTH.threshold,
        "Count of slow calls at which a target becomes abnormal, so that its callbacks are diverted.",
    )
    callback_calm_s: float = option(
        _HEALTH.calm_s, "Seconds after a slow call in which quick calls do not decrement the count."
    )
    callback_guards_off: tuple[str, ...] = option(
        (),
        "Guards of the breaker that are off, comma-separated: `early` (a slow call counts as soon as it is slow), `share` (at "
        "least 5 % of the recent calls must be slow), `decay` (an idle abnormal target recovers).",
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

    @cached_property
    def health(self) -> HealthPolicy:
        """The policy that decides when a target is abnormal."""
        return HealthPolicy(
            slow_s=self.callback_slow_s,
            threshold=self.callback_abnormal_count,
            ceiling=_CEILING * self.callback_abnormal_count,
            calm_s=self.callback_calm_s,
            share=0.0 if "share" in self.callback_guards_off else _HEALTH.share,
            decay_s=0.0 if "decay" in self.callback_guards_off else _HEALTH.decay_s,
            self_check_share=self.callback_suspicion_share,
        )

    @cached_property
    def drain(self) -> DrainPolicy:
        """The policy that decides how fast held callbacks are drained."""
        probe_s = PROBE * self.callback_slow_s
        return DrainPolicy(
            rate=self.callback_drain_rate, probe_s=probe_s, probe_most_s=_LONGEST_PROBE * probe_s
        )

    @property
    def counts_early(self) -> bool:
        """Whether a slow call counts as soon as it is slow, and not at its end."""
        return "early" not in self.callback_guards_off

    @property
    def horizon_s(self) -> float:
        """Seconds after which an attempt without a recorded outcome (after a crash) is repeated."""
        return max(HORIZON * self.callback_timeout_s, LEAST_HORIZON_S)

    @property
    def republish_s(self) -> float:
        """Seconds after which a published callback is published again, if no process has begun."""
        # A record may wait in memory, and must not be published again meanwhile.
        return max(REPUBLISH * self.callback_timeout_s, LEAST_REPUBLISH_S)

    @property
    def host_slots(self) -> int:
        """Most calls to one trusted host on the normal path."""
        return max(self.callback_target_slots, round(_HOST_SHARE * self.callback_slots))

    @property
    def slow_slots(self) -> int:
        """Most slow calls, which occupy no slot of the normal path."""
        return max(1, round(_SLOW_SHARE * self.callback_slots))

    @cached_property
    def lane_bounds(self) -> LaneBounds:
        """The bounds of the normal path."""
        return LaneBounds(
            slots=self.callback_slots,
            target_slots=self.callback_target_slots,
            host_slots=self.host_slots,
            untrusted_slots=2 * self.callback_target_slots,
            server_slots=max(2 * self.callback_target_slots, self.callback_slots // 8),
            unresponsive_slots=max(1, self.callback_slots // 2),
            lane_size=LANE_SIZE,
            total_size=MAX_WAITING // 2,
            longest_wait_s=LONGEST_WAIT_S,
        )

    @cached_property
    def diverted_lane_bounds(self) -> LaneBounds:
        """The bounds of the diverted path."""
        slots = self.callback_diverted_slots
        return LaneBounds(
            slots=slots,
            target_slots=DIVERTED_TARGET_SLOTS,
            # Two slots stay free for targets that respond, such as a recovering one.
            host_slots=max(1, slots - 2),
            untrusted_slots=min(2 * DIVERTED_TARGET_SLOTS, slots),
            server_slots=max(1, slots - 2),
            unresponsive_slots=max(1, slots - 2),
            lane_size=LANE_SIZE,
            total_size=MAX_WAITING // 4,
            longest_wait_s=LONGEST_WAIT_S,
        )

    @property
    def slow_host_slots(self) -> int:
        """Most calls to one host in the slow pool."""
        return max(SLOW_TARGET_SLOTS, self.slow_slots // 8)

    @property
    def slow_server_slots(self) -> int:
        """Most calls to one server in the slow pool."""
        return max(SLOW_TARGET_SLOTS, self.slow_slots // 4)

    @cached_property
    def policy(self) -> DeliveryPolicy:
        """The schedule of attempts.

        Raises:
            ValueError: a delay is not a number.
        """
        return DeliveryPolicy(tuple(float(delay) for delay in self.callback_schedule_s))

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The non-public networks that may be called.

        Raises:
            ValueError: an entry is not a network.
        """
        return parse_networks(self.callback_allow)

    def validate(self) -> list[str]:
        """Secrets are required; a waiting callback must not look like a stall."""
        problems = super().validate()
        problems += self._secret_problems()
        problems += self._network_problems()
        problems += self._bound_problems(_LEAST, _ABOVE_0, [("callback_suspicion_share", 0, 1)])
        if self.callback_slots < self.callback_target_slots:
            problems.append(
                f"callback_slots={self.callback_slots} must be at least "
                f"callback_target_slots={self.callback_target_slots}"
            )
        problems += [
            f"callback_guards_off={name!r} must be one of {', '.join(GUARDS)}"
            for name in self.callback_guards_off
            if name not in GUARDS
        ]
        # Records are acknowledged in order: a waiting one delays all later ones of its partition.
        if self.stall_timeout_s < 2 * LONGEST_WAIT_S:
            problems.append(f"stall_timeout_s={self.stall_timeout_s} must be at least {2 * LONGEST_WAIT_S:g}")
        return problems + self._schedule_problems()

    def _schedule_problems(self) -> list[str]:
        try:
            if all(0 <= delay < float("inf") for delay in self.policy.schedule_s):
                return []
        except ValueError:
            pass
        given = ",".join(self.callback_schedule_s)
        return [f"callback_schedule_s={given!r} must be seconds from 0 on, comma-separated"]

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
