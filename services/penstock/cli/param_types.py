"""Types of numeric options. A number that 64 bits or JSON cannot express is a usage error."""

from __future__ import annotations

import math
from typing import Any, Final

import click
from click.types import FloatParamType, IntParamType

_INTEGER_LIMIT = 2**63

# The value `none` of an option, which differs from an option without a value.
NO_LIMIT: Final = "none"


class Whole(IntParamType):
    """An integer of 64 bits.

    Args:
        minimum: smaller integers are a usage error. None leaves the check to the gateway.
    """

    def __init__(self, minimum: int | None = None) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer, if it is within the bounds."""
        number: int = super().convert(value, param, ctx)
        if self._minimum is not None and number < self._minimum:
            self.fail(f"{number} is not at least {self._minimum}.", param, ctx)
        if not -_INTEGER_LIMIT <= number < _INTEGER_LIMIT:
            self.fail(f"{number} does not fit 64 bits.", param, ctx)
        return number


class Finite(FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, if it is finite."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Rate(Finite):
    """A rate a second: a finite number above 0."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The rate, if it is above 0."""
        rate = super().convert(value, param, ctx)
        if not rate > 0:
            self.fail(f"{value} is not above 0.", param, ctx)
        return rate


class OrNone(click.ParamType):
    """A number, or `none`, which removes a limit.

    Args:
        number: type of the number.
    """

    def __init__(self, number: click.ParamType) -> None:
        self._number = number
        self.name = f"{number.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number or `NO_LIMIT`."""
        return NO_LIMIT if value in ("none", NO_LIMIT) else self._number.convert(value, param, ctx)
