"""Runs the command line within a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from click.testing import CliRunner, Result

from penstock.cli.main import cli

Invoke = Callable[..., Awaitable[Result]]


def invoker(*verb: str) -> Invoke:
    """Runs a verb in a thread, because this process's event loop serves the gateway."""

    async def invoke(*arguments: str, **more: Any) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, cli, [*verb, *arguments], **more)

    return invoke


def documents(outcome: Result) -> list[Any]:
    """The JSON documents that a verb has printed, one a line."""
    assert outcome.exit_code in (0, 1), outcome.output
    return [json.loads(line) for line in outcome.stdout.splitlines()]
