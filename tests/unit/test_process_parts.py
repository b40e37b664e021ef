"""The parts of a service run together."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import Fatal, KafkaUnavailable
from penstock.process import run_all, run_with_background


async def forever() -> None:
    await asyncio.Event().wait()


async def cancelled_by_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("run", [run_all, run_with_background])
async def test_a_part_that_is_cancelled_by_itself_ends_the_service(run):
    """O2a: a client library may cancel a part while it closes. The others would look alive."""
    with pytest.raises(Fatal, match="without a request"):
        await run(forever(), cancelled_by_itself())


@pytest.mark.parametrize("run", [run_all, run_with_background])
async def test_an_error_is_raised_rather_than_the_cancellation_it_has_caused(run):
    """O2: a service that lacks a server begins again; it does not end."""

    async def fails() -> None:
        raise KafkaUnavailable("no broker answers")

    with pytest.raises(KafkaUnavailable):
        await run(forever(), cancelled_by_itself(), fails())


@pytest.mark.parametrize("run", [run_all, run_with_background])
async def test_the_cancellation_of_a_service_cancels_its_parts(run):
    """S1: this is its stop, and no failure."""
    ended = []

    async def part() -> None:
        try:
            await forever()
        finally:
            ended.append(1)

    running = asyncio.create_task(run(part(), part()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(ended) == 2
