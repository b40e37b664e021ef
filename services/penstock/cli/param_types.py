"""Types of options: numbers, moments and durations.

A number that 64 bits or JSON cannot express is a usage error.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
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


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,6})?(?:ms|[smhdw]))+")
_PART = re.compile(r"([\d.]+)(ms|[smhdw])")


def duration_of(text: str) -> timedelta | None:
    """The duration of a text such as `90s`, `1h30m` or `7d`; None for another text.

    Raises:
        OverflowError: no timedelta is that long.
    """
    if not _DURATION.fullmatch(text):
        return None
    return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


class Duration(click.ParamType):
    """A duration such as `90s`, `1h30m` or `7d`, above zero."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """The duration that the text means."""
        if isinstance(value, timedelta):
            return value
        try:
            duration = duration_of(value)
            if duration is not None:
                # The calendar must have the moment at the end of the duration.
                _ = datetime.now(UTC) + duration
        except OverflowError:
            self.fail(f"{value!r} is too long.", param, ctx)
        if duration is None:
            self.fail(f"{value!r} is no duration such as 30m, 12h or 90d.", param, ctx)
        if not duration:
            self.fail(f"{value!r} is zero; give a longer duration.", param, ctx)
        return duration


class Milliseconds(Whole):
    """Whole milliseconds: an integer, or a duration such as `5m`."""

    name = "ms|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The milliseconds."""
        if isinstance(value, str) and _DURATION.fullmatch(value):
            value = round(Duration().convert(value, param, ctx).total_seconds() * 1_000)
        return super().convert(value, param, ctx)


class Seconds(Finite):
    """Seconds: a number, or a duration such as `5m`."""

    name = "seconds|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        if isinstance(value, str) and _DURATION.fullmatch(value):
            return Duration().convert(value, param, ctx).total_seconds()
        return super().convert(value, param, ctx)


def _checked(moment: datetime) -> datetime:
    """The moment with an offset, if UTC can express it.

    Raises:
        OverflowError: it exceeds the years that datetime has.
    """
    try:
        in_utc = moment.astimezone(UTC)
    except ValueError as error:
        # Python raises it for a moment without an offset.
        raise OverflowError(str(error)) from error
    return in_utc if moment.tzinfo is None else moment


class Moment(click.ParamType):
    """A moment in ISO 8601, a day, or a duration before now; without an offset it is local time.

    Args:
        ahead: a duration counts from now on, instead of backwards.
    """

    name = "moment"

    def __init__(self, *, ahead: bool = False) -> None:
        self._sign = 1 if ahead else -1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The moment."""
        try:
            if isinstance(value, datetime):
                moment = value
            elif (duration := duration_of(value)) is not None:
                moment = datetime.now(UTC) + self._sign * duration
            else:
                moment = datetime.fromisoformat(value)
            return _checked(moment)
        except OverflowError:
            self.fail(f"{value!r} is outside the years 1 to 9999 of UTC.", param, ctx)
        except ValueError:
            self.fail(
                f"{value!r} is no moment: write 2026-11-23, 2026-11-23T06:00, 2026-11-23T06:00:00Z, or a duration such as 10m.",
                param,
                ctx,
            )


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
