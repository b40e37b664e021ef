"""Waits for the run of another flow of the same schedule tick.

A run is the latest flow of a definition with a tick. A wait for it is stored like a wait for an
event, in a namespace that no user has. It ends when that flow has ended, also if it ended before.
"""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.core.access import namespace_of

# The namespace of waits for runs: no event that a user sends can match.
NAMESPACE = ""
PREFIX = "flow:"


def awaited_run(flow: str, tick: datetime) -> tuple[str, str]:
    """The name and the key under which a wait for a run is stored.

    Args:
        flow: name of the definition.
        tick: nominal time.
    """
    return f"{PREFIX}{flow}", tick.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def problem_of(flow: str, awaited: str) -> str | None:
    """Why a flow cannot wait for another one; None if it can.

    Args:
        flow: name of the definition that waits.
        awaited: name of the other definition.
    """
    if flow == awaited:
        return "the flow would wait for itself, and never end: name another flow"
    if namespace_of(flow) != namespace_of(awaited):
        return (
            f"{awaited!r} is in the namespace {namespace_of(awaited)}, and a flow can wait only for flows of "
            f"its own, {namespace_of(flow)}"
        )
    return None
