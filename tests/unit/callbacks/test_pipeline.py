"""What the pipeline concludes from a call; the test plays Kafka, PostgreSQL and the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.callbacks.caller import CallResult
from penstock.callbacks.hosts import Hosts
from penstock.callbacks.ledger import Claimed, EndedAttempt
from penstock.callbacks.outcomes import SECRET_RETRY_S
from penstock.callbacks.pipeline import Pipeline
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.router import Call
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Target
from penstock.contracts.event import Callback
from penstock.core.health import HealthSnapshot
from penstock.core.target import TargetId
from penstock.kafka.topology.topics import CALLBACKS_DIVERTED
from penstock.postgres.targets import StoredTarget

TARGET = TargetId("acme", "http://hangs.example/hook")
SETTINGS = CallbacksSettings()


class Record:
    """A record of Kafka."""

    topic = CALLBACKS_DIVERTED.name
    partition = 0

    def settle(self) -> None:
        """Nothing to acknowledge."""


class Caller:
    """Answers each call with one result."""

    def __init__(self, result: CallResult) -> None:
        self.result = result

    async def call(self, _callback: Callback) -> CallResult:
        return self.result


def pipeline_of(caller: Any, hosts: Hosts) -> Pipeline:
    """A pipeline without servers."""
    secrets: Any = SimpleNamespace(prepare=done)
    unused: Any = None
    return Pipeline(
        SETTINGS,
        unused,
        caller,
        unused,
        unused,
        hosts,
        secrets,
        owner="o",
        partition_of=lambda _url: 0,
        random_share=lambda: 0.5,
    )


async def done(_argument: object) -> None:
    """Nothing to do."""


@pytest.mark.parametrize("unrecorded", [False, True])
async def test_a_claim_frees_each_slot_once(unrecorded: bool) -> None:
    """C5: Kafka delivers a callback again. Whether the outcome of its call is recorded before the
    claim, during it or later, its slot is freed once."""
    caller = Caller(CallResult(took_s=0.1, kind="HTTP", message="", status=200))
    pipeline = pipeline_of(caller, Hosts(SETTINGS))
    turn, lanes, recorder = pipeline._turn, pipeline._router.diverted, pipeline._recorder
    in_flight = InFlight(Callback(id="msg_1", target=TARGET, task_id=1, attempt=0, body=b"{}"), Record())
    recorder._unrecorded = {"msg_1"} if unrecorded else set()

    async def claim(batch: list[InFlight]) -> Claimed:
        recorder._unrecorded = set() if unrecorded else {"msg_1"}
        return Claimed([], list(batch))

    turn._attempts = cast("Any", SimpleNamespace(claim=claim))
    lanes.put(in_flight)
    assert lanes.admit() == [in_flight]
    await turn._claim([in_flight])
    assert lanes.slots_in_use == 0


@pytest.mark.parametrize(
    ("result", "trusted", "state"),
    [
        (
            CallResult(took_s=0.0, kind="Secret", message="secret 1 cannot be used", called=False),
            False,
            "pending",
        ),
        (CallResult(took_s=0.1, kind="HTTP", message="the target answered 500", status=500), True, "dead"),
    ],
    ids=["no request", "an answer"],
)
async def test_only_a_request_counts(result: CallResult, trusted: bool, state: str) -> None:
    """C5, C7: a callback without a usable secret makes no request. A target that hangs stays
    unresponsive and abnormal, and its host does too. The schedule counts only the attempts with a
    request, so the callback does not die of a secret that the operator has to repair."""
    hosts = Hosts(SETTINGS)
    pipeline = pipeline_of(Caller(result), hosts)
    ended: list[EndedAttempt] = []
    recorder: Any = SimpleNamespace(add=ended.append)
    pipeline._recorder._ended = recorder
    cache, lanes = pipeline._cache, pipeline._router.diverted
    cache.assign([0])
    health = HealthSnapshot(count=SETTINGS.callback_abnormal_count, slow_at_s=0.0, abnormal=True)
    host = hosts.of(TARGET)
    host.unresponsive = True
    target = Target(StoredTarget(target=TARGET, health=health), 0, SETTINGS, host)
    cache.put(TARGET, target)
    last = SETTINGS.policy.attempts - 1
    in_flight = InFlight(Callback(id="msg_1", target=TARGET, task_id=1, attempt=last, body=b"{}"), Record())
    lanes.put(in_flight)
    assert lanes.admit() == [in_flight]
    assert lanes.start(in_flight)
    await pipeline._turn._call(Call(in_flight, lanes, in_self_check=False))
    assert (target.trusted, host.trusted) == (trusted, trusted)
    assert (target.unresponsive, host.unresponsive) == (not trusted, not trusted)
    assert cache.is_abnormal(target) is not trusted
    assert lanes.slots_in_use == 0
    assert [(each.row.state, each.row.uncounted) for each in ended] == [(state, int(not trusted))]
    assert ended[0].row.due_in_s <= SECRET_RETRY_S
