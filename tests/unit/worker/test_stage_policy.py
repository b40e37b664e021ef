"""The policy of a stage: exceptions after which it is not tried again, attempts and delays."""

import math

import orjson
import pytest

from penstock.contracts.context import Context
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import encode_results
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.worker import Backoff, Done, Fail, Worker
from penstock.worker.execution import Execution


async def failure(error, *, synchronous, **policy):
    """The result of a handler that raises."""
    worker = Worker(worker_gateway="http://gateway.example")

    async def raises(_task):
        raise error

    def raises_on_a_thread(_task):
        raise error

    worker.stage("t.start", **policy)(raises_on_a_thread if synchronous else raises)
    ready = ReadyTask(Fence(1, 0, "start", 0), "t", Context.encode(None), 60_000)
    result = await Execution(worker._stages, None, 1).run(ready, pytest.fail)
    assert result.outcome is Outcome.FAIL
    return result


@pytest.mark.parametrize("synchronous", [False, True])
async def test_the_policy_of_a_stage_names_permanent_exceptions(synchronous):
    """W1: a subclass counts, another exception is tried again."""
    policy = {"permanent": (LookupError, TimeoutError), "synchronous": synchronous}
    assert (await failure(KeyError("x"), **policy)).permanent
    assert (await failure(TimeoutError("x"), **policy)).permanent
    assert not (await failure(ValueError("x"), **policy)).permanent
    assert (await failure(ValueError("x"), permanent=ValueError, synchronous=synchronous)).permanent
    assert not (await failure(ValueError("x"), synchronous=synchronous)).permanent


@pytest.mark.parametrize("wrong", ["ValueError", ValueError("x"), int])
def test_what_is_no_exception_is_refused_at_registration(wrong):
    """O8: the message names what was given."""
    worker = Worker(worker_gateway="http://gateway.example")
    with pytest.raises(SettingsError, match=r"stage\('t.start'\): permanent=.* is no class of exceptions"):
        worker.stage("t.start", permanent=[wrong])


async def result_of(returned, *, tries=0, **policy):
    worker = Worker(worker_gateway="http://gateway.example")
    worker.stage("t.start", **policy)(lambda _task: returned)
    ready = ReadyTask(Fence(1, 0, "start", 0), "t", Context.encode(None), 60_000, tries=tries)
    return await Execution(worker._stages, None, 1).run(ready, pytest.fail)


async def test_a_failure_has_the_delay_of_its_stage():
    """W1: it grows with failed attempts, and the platform reads it as it was sent, also zero."""
    backoff = Backoff(base_s=2, factor=3, max_s=50, jitter=0)
    for tries, delay_ms in ((0, 2_000), (1, 6_000), (2, 18_000), (3, 50_000), (400, 50_000)):
        found = await result_of(Fail("x"), tries=tries, backoff=backoff)
        assert found.delay_ms == delay_ms
        assert decode_results(encode_results("w", [found])) == ("w", [found], [])
    found = await result_of(Fail("x"), backoff=Backoff(base_s=0, max_s=0))
    assert decode_results(encode_results("w", [found]))[1][0].delay_ms == 0
    assert (await failure(ValueError(), backoff=backoff, synchronous=False)).delay_ms == 2_000


async def test_without_a_delay_of_its_stage_the_type_decides():
    """The result has no delay then."""
    for returned, policy in (
        (Fail("x"), {}),
        (Fail("x", permanent=True), {"backoff": Backoff(base_s=9)}),
        (Done(), {"backoff": Backoff(base_s=9)}),
    ):
        found = await result_of(returned, **policy)
        assert found.delay_ms is None
        assert "delay_ms" not in orjson.loads(encode_results("w", [found]))["results"][0]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"max_attempts": 0}, "max_attempts=0 must be at least 1"),
        ({"max_attempts": "3"}, "max_attempts='3' must be an integer"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"concurrency": 1.5}, "concurrency=1.5 must be an integer"),
        ({"concurrency": True}, "concurrency=True must be an integer"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
        ({"timeout_s": -1}, "timeout_s=-1 must be above 0"),
        ({"timeout_s": math.nan}, "timeout_s=nan must be above 0"),
        ({"timeout_s": math.inf}, "timeout_s=inf must be above 0"),
        ({"timeout_s": "5"}, "timeout_s='5' must be above 0"),
        ({"backoff": 5}, r"backoff=5 must be a Backoff, as in Backoff\(base_s=30"),
        ({"backoff": Backoff(base_s=-1)}, "backoff: base_s=-1 must not be negative"),
        ({"backoff": Backoff(base_s=math.nan)}, "backoff: base_s=nan must not be negative"),
        ({"backoff": Backoff(base_s="1")}, "must have numbers"),
        ({"backoff": Backoff(base_s=9, max_s=1)}, "max_s=1 must not be below base_s=9"),
        ({"backoff": Backoff(jitter=2)}, "jitter=2 must be from 0 to 1"),
        ({"backoff": Backoff(max_s=1e9)}, "at most 31,536,000"),
    ],
)
def test_a_policy_that_is_not_possible_is_refused_at_registration(policy, words):
    """O8: the message names the stage, the argument and its value."""
    worker = Worker(worker_gateway="http://gateway.example")
    with pytest.raises(SettingsError, match=rf"stage\('t.start'\): .*{words}"):
        worker.stage("t.start", **policy)


def test_an_unknown_argument_names_the_nearest_one():
    """O8: a misspelt limit would otherwise be no limit, or an error without a hint."""
    worker = Worker(worker_gateway="http://gateway.example")
    with pytest.raises(
        TypeError, match=r"stage\(\) has no argument 'max_atempts': did you mean 'max_attempts'\?"
    ):
        worker.stage("t.start", max_atempts=3)
    with pytest.raises(TypeError, match=r"has no argument 'zzz': it has name, timeout_s, max_attempts"):
        worker.stage("t.start", zzz=3)
    with pytest.raises(TypeError, match="did you mean 'worker_gateway'"):
        Worker(worker_gatway="http://gateway.example")
    with pytest.raises(TypeError, match="give either all settings or single ones, not both: pool"):
        Worker(worker.settings, pool=3)
