"""The callbacks that the services would send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SentCallback:
    """A callback that a target would receive; a pipeline calls nothing.

    Attributes:
        url: of the target.
        event: the body.
        headers: in addition to the standard ones; the values may be secrets.
    """

    url: str
    event: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
