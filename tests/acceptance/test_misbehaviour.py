"""Handlers that misbehave, on a whole deployment: retried by policy, then failed, with the reason in the API."""

import asyncio
import os
import sys

import pytest

from penstock.client import Client, Draft
from penstock.local.deployment import Deployment, Options

EXPECTED = {
    "raises": ("LookupError", "there is no spoon"),
    "nonsense": ("TypeError", "it must return Next, Done, Fail or RetryAfter"),
    "hangs": ("Timeout", "longer than 0.3 s"),
    "hangs-on-a-thread": ("Timeout", "its thread was left behind"),
    "swallows": ("Timeout", "swallowed its cancellation"),
    "exits": ("SystemExit", "3"),
    "exits-on-a-thread": ("SystemExit", "3"),
    "stops-iterating": ("StopIteration", "StopIteration"),
    "unprintable": ("OSError", "no such file: \\udcff.mp4"),
    "no-such-stage": ("NoHandler", "it has: exits, exits-on-a-thread, hangs, "),
}


@pytest.mark.slow
async def test_misbehaving_handlers_fail_their_own_tasks_and_nobody_elses(tmp_path):
    """W1 and the issue's last point: each is tried as often as the type says, then failed, with kind, message and
    traceback in the API; a task that recovers goes on, its large context invisible."""
    options = Options(data_dir=tmp_path, kafka_port=0, postgres_port=0, gateway_port=0)
    async with Deployment(options) as deployment, Client(deployment.gateway_url) as client:
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
            submitted = await client.submit_many(drafts)
            await client.wait([task.id for task in submitted])
            tasks = [await client.get(task.id) for task in submitted]
        finally:
            worker.terminate()
            # Even with a thread that hangs for a minute and a handler that nothing ends.
            assert await worker.wait() == 0
    *failed, recovered = tasks
    for task, (kind, words) in zip(failed, EXPECTED.values(), strict=True):
        assert (task.state, len(task.attempts)) == ("failed", 2), task.raw
        assert task.error["kind"] == kind
        assert words in task.error["message"]
        assert [attempt["error"]["kind"] for attempt in task.attempts] == [kind, kind]
    assert "in raises\n" in failed[0].error["traceback"]
    assert (recovered.state, recovered.result) == ("succeeded", {"letters": 10_000})
    assert [attempt["outcome"] for attempt in recovered.attempts] == ["fail", "next", "done"]
