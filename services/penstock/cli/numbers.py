"""Numbers on the command line: those that no integer of 64 bits and no JSON can hold are wrong usage."""

from __future__ import annotations

import math
from typing import Any, Final

import click
from click.types import FloatParamType, IntParamType

_BEYOND = 2**63

# Given as `none`, where nothing given is something else.
NO_LIMIT: Final = "none"


class Whole(IntParamType):
    """An integer of 64 bits.

    Args:
        least: smaller ones are wrong usage; None leaves it to whoever is asked to say what is too small.
    """

    def __init__(self, least: int | None = None) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """As click's own, and within bounds."""
        found: int = super().convert(value, param, ctx)
        if self._least is not None and found < self._least:
            self.fail(f"{found} is not at least {self._least}.", param, ctx)
        if not -_BEYOND <= found < _BEYOND:
            self.fail(f"{found} does not fit 64 bits.", param, ctx)
        return found


class Finite(FloatParamType):
    """A number, and neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's own, and finite."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class Pace(Finite):
    """Something a second: finite, and above 0."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As a finite number's, and above 0."""
        found = super().convert(value, param, ctx)
        if not found > 0:
            self.fail(f"{value} is not above 0.", param, ctx)
        return found


class OrNone(click.ParamType):
    """A number, or `none`, which takes a limit away.

    Args:
        number: what it is when it is not `none`.
    """

    def __init__(self, number: click.ParamType) -> None:
        self._number = number
        self.name = f"{number.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or `NO_LIMIT`."""
        return NO_LIMIT if value in ("none", NO_LIMIT) else self._number.convert(value, param, ctx)
