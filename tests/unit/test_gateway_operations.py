"""Going on with operations, without a database."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.contracts.event import Owed
from penstock.gateway.operations import Operations
from penstock.postgres import operations
from penstock.postgres.operations import Step, Which


class Broker:
    def owe(self, owed: Owed) -> None:
        """Owes nothing."""


async def test_what_has_ended_while_two_were_at_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """O2c: a request and the loop meet at one operation, and the one that found it taken asks again after the other has
    ended it: then nothing is due any more, so the loop rests."""
    ended = asyncio.Event()
    waits = iter([0.0, None])

    async def go_on(*_arguments: Any, **_more: Any) -> Step:
        wait_s = next(waits)
        if wait_s is None:
            ended.set()
        else:
            await ended.wait()
        return Step(0, Owed(), wait_s)

    monkeypatch.setattr(operations, "go_on", go_on)
    found = Operations(cast(Any, SimpleNamespace(event_source="test")), cast(Any, None), cast(Any, Broker()))
    found._which["one"], found._due["one"] = Which(), 0.0
    await asyncio.gather(found._go_on("one"), found._go_on("one"))
    await found._go_on("one")
    assert found._due == {}
