"""Handlers that misbehave, on a whole deployment: their tasks are retried by policy, then failed
with a reason."""

import asyncio
import os
import sys

from penstock.client import Client, Draft
from penstock.local.deployment import Deployment
from tests.support.waiting import wait_until

EXPECTED = {
    "raises": ("LookupError", "there is no spoon"),
    "nonsense": ("TypeError", "it must return Next, Done, Fail, RetryAfter, Spawn or Wait"),
    "hangs": ("Timeout", "longer than 0.3 s"),
    "hangs-on-a-thread": ("Timeout", "its thread was abandoned"),
    "swallows": ("Timeout", "swallowed its cancellation"),
    "exits": ("SystemExit", "3"),
    "exits-in-a-group": ("SystemExit", "0"),
    "exits-in-a-callback": ("Timeout", "longer than 0.3 s"),
    "exits-on-a-thread": ("SystemExit", "3"),
    "stops-iterating": ("StopIteration", "StopIteration"),
    "unprintable": ("OSError", "no such file: \\udcff.mp4"),
}
MISSING = "no-such-stage"


async def handed_back(client, task_id):
    """W1: a task whose stage no worker has is not failed after twice its attempts, and `why` tells
    it."""
    task = await client.get(task_id)
    why = await client.why(task_id)
    return len(task.attempts) >= 4 and why["reason"] == "no_handler" and "it has: exits, " in why["sentence"]


async def test_misbehaving_handlers_fail_only_their_own_tasks(shared_options):
    """W1: each misbehaving handler that raises or hangs is tried as often as the type allows. Its
    task then fails, with kind, message and traceback in the API. A handler that recovers continues
    with its next stage and a large context."""
    async with Deployment(shared_options()) as deployment, Client(deployment.gateway_url) as client:
        await client.register_type("bad", max_attempts=2, retry_base_ms=50)
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.acceptance.misbehaving_worker",
            env={**os.environ, **deployment.environment},
        )
        try:
            drafts = [
                Draft(type="bad", stage=stage, context={"thing": "spoon"})
                for stage in [*EXPECTED, "recovers"]
            ]
            missing = await client.submit("bad", stage=MISSING)
            submitted = await client.submit_many(drafts)
            await client.wait([task.id for task in submitted])
            tasks = [await client.get(task.id) for task in submitted]
            await wait_until(lambda: handed_back(client, missing.id), what="its stage has no handler")
        finally:
            worker.terminate()
            # The worker stops although a thread hangs and a handler ignores its cancellation.
            assert await worker.wait() == 0
    *failed, recovered = tasks
    for task, (stage, (kind, words)) in zip(failed, EXPECTED.items(), strict=True):
        # A handler that returns nonsense has ended, and would return it again.
        attempts = 1 if stage == "nonsense" else 2
        assert (task.state, len(task.attempts)) == ("failed", attempts), task.raw
        assert task.error["kind"] == kind
        assert words in task.error["message"]
        assert [attempt["error"]["kind"] for attempt in task.attempts] == [kind] * attempts
    assert "in raises\n" in failed[0].error["traceback"]
    assert (recovered.state, recovered.result) == ("succeeded", {"letters": 10_000})
    assert [attempt["outcome"] for attempt in recovered.attempts] == ["fail", "next", "done"]
