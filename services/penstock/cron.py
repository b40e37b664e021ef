"""Cron expressions, by cronsim. Its types and errors do not leave this module.

Only its parsing and its wall clock without a zone are used. The rules of zones are in
`penstock.core.schedule`: cronsim's own skip ticks where clocks change by half an hour, and go back
in UTC when a search begins in a repeated hour
([decision 049](../../docs/decisions/049-schedules.md)).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from penstock.core.schedule import Ticks
from penstock.errors import InvalidRecord

_HOURS = 24
# Any moment: it only lets the library read the fields.
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)


@lru_cache(maxsize=20_000)
def parse_cron(expression: str, zone: str) -> Ticks:
    """The ticks of a cron expression with five fields: minute, hour, day, month, day of the week.

    Raises:
        InvalidRecord: the expression or the zone is wrong; `pointer` says which.
    """
    if len(expression.split()) != 5:
        raise InvalidRecord(
            "a cron expression has five fields: minute, hour, day, month and day of the week",
            pointer="/cron",
        )
    try:
        hours = CronSim(expression, _EPOCH).hours
    except CronSimError as error:
        field = str(error).removeprefix("Bad ")
        raise InvalidRecord(f"{expression!r} has a wrong {field}", pointer="/cron") from error

    def wall_times(after: datetime) -> Iterator[datetime]:
        return CronSim(expression, after)

    return Ticks(wall_times, _zone(zone), every_hour=len(hours) == _HOURS)


def cron_faults(expression: str | None, zone: str | None) -> list[InvalidRecord]:
    """All faults of an expression and of a zone; None is one that is not looked at."""
    found = []
    for each, where in ((expression, "UTC"), ("* * * * *" if zone is not None else None, zone or "UTC")):
        try:
            if each is not None:
                parse_cron(each, where)
        except InvalidRecord as error:
            found.append(error)
    return found


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRecord(
            f"there is no time zone {name!r}: name one of the IANA database, such as Europe/Berlin",
            pointer="/zone",
        ) from error
