"""Task types that a worker's code declares; `type_registration` registers them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contracts import subscription
from penstock.errors import InvalidRecord, SettingsError

# A worker whose code has other settings than a registered type changes it, or refuses to start.
CHANGE = "change"
REFUSE = "refuse"
MODES = (CHANGE, REFUSE)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
# Settings in seconds, and the setting in milliseconds of the same name.
_SECONDS = {"lease_s": "lease_ms", "retry_base_s": "retry_base_ms", "retry_max_s": "retry_max_ms"}


@dataclass(frozen=True, slots=True)
class Type:
    """A task type, with the settings that the code decides.

    A setting that is None is left to others: it stays as it is registered, and a new type has its
    default. So a limit that an operator has set survives a restart of the worker. Settings are
    those of `penstock types add`.

    Attributes:
        name: letters, digits, `_` and `-`.
        first_stage: the first stage of tasks that name none.
        partitions: of the ready topic; cannot be changed later.
        lease_s: the lease of a task in seconds; `lease_ms` is the same in milliseconds.
        lease_ms: see `lease_s`.
        max_attempts: attempts of a stage, the first included.
        retry_base_s: the delay before the second attempt in seconds, or `retry_base_ms`.
        retry_base_ms: see `retry_base_s`.
        retry_factor: the factor between two delays.
        retry_max_s: the longest delay in seconds, or `retry_max_ms`.
        retry_max_ms: see `retry_max_s`.
        retry_jitter: the random share of each delay, from 0 to 1.
        events: "final" or "all".
        max_losses: lost workers of a stage above which a task is quarantined.
        late_results: "accept" or "refuse".
        idempotency: "lenient" or "strict".
        callbacks: targets of tasks that name none.
        max_in_flight: tasks that are queued or running at once.
        starts_per_s: tasks that are released a second.
        max_per_key: tasks of one concurrency key that are queued or running at once.
        fair: whether concurrency keys take turns.
        ageing_s: seconds of waiting after which a task gains one level of priority.
        finish_first: whether tasks in a later stage are released first.
        no_handler_s: seconds for which workers hand a task back, because they have no handler for
            its stage, until it fails.

    Raises:
        SettingsError: the name or a target is impossible, or a setting is given twice.
    """

    name: str
    _: dataclasses.KW_ONLY
    first_stage: str | None = None
    partitions: int | None = None
    lease_s: float | None = None
    lease_ms: int | None = None
    max_attempts: int | None = None
    retry_base_s: float | None = None
    retry_base_ms: int | None = None
    retry_factor: float | None = None
    retry_max_s: float | None = None
    retry_max_ms: int | None = None
    retry_jitter: float | None = None
    events: str | None = None
    max_losses: int | None = None
    late_results: str | None = None
    idempotency: str | None = None
    # Not in the repr, because headers are secrets.
    callbacks: Sequence[str | Mapping[str, Any]] | None = dataclasses.field(default=None, repr=False)
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    max_per_key: int | None = None
    fair: bool | None = None
    ageing_s: float | None = None
    finish_first: bool | None = None
    no_handler_s: float | None = None

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SettingsError(f"Type({self.name!r}): a name has letters, digits, _ and -, at most 100")
        for seconds, milliseconds in _SECONDS.items():
            if getattr(self, seconds) is None:
                continue
            if getattr(self, milliseconds) is not None:
                raise SettingsError(f"Type({self.name!r}): give {seconds} or {milliseconds}, not both")
            if not isinstance(getattr(self, seconds), int | float) or not 0 <= getattr(self, seconds) <= 1e9:
                raise SettingsError(
                    f"Type({self.name!r}): {seconds}={getattr(self, seconds)!r} is no number of seconds"
                )
        if self.callbacks is not None:
            if isinstance(self.callbacks, str | Mapping):
                raise SettingsError(f"Type({self.name!r}): callbacks is a list of targets")
            try:
                subscription.read(self.callbacks)
            except (InvalidRecord, KeyError, TypeError, ValueError, AttributeError) as error:
                raise SettingsError(f"Type({self.name!r}): {error}") from error

    def settings(self) -> dict[str, Any]:
        """The settings that are given, as fields of `task-type.schema.json`."""
        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "name" and (value := getattr(self, field.name)) is not None
        }
        for seconds, milliseconds in _SECONDS.items():
            if seconds in given:
                given[milliseconds] = round(given.pop(seconds) * 1000)
        if "callbacks" in given:
            given["callbacks"] = subscription.to_wire(subscription.read(given["callbacks"]))
        return given

    def differences(self, registered: Mapping[str, Any]) -> dict[str, Any]:
        """The given settings that differ from those of the registered type.

        Values of headers are secrets, which a gateway masks, so a change of one alone is not seen.

        Args:
            registered: the document of the gateway.
        """
        shown = self.settings()
        if self.callbacks is not None:
            shown["callbacks"] = subscription.masked(subscription.read(self.callbacks))
        differing = {name for name, value in shown.items() if value != registered.get(name)}
        return {name: value for name, value in self.settings().items() if name in differing}


def types_of(types: Iterable[Type], differ: str = CHANGE) -> tuple[Type, ...]:
    """The types of `Worker(types=…, types_differ=…)`.

    Raises:
        SettingsError: it is no list of types, two have one name, or there is no such mode.
    """
    if differ not in MODES:
        raise SettingsError(f"types_differ={differ!r} must be one of: {', '.join(MODES)}")
    if isinstance(types, str | Mapping | Type) or not isinstance(types, Iterable):
        raise SettingsError(f"types={types!r} is no list of Type objects")
    found = tuple(types)
    names: set[str] = set()
    for each in found:
        if not isinstance(each, Type):
            raise SettingsError(f"types: {each!r} is no Type: write Type('order', first_stage='reserve')")
        if each.name in names:
            raise SettingsError(f"types: {each.name} is given twice")
        names.add(each.name)
    return found
