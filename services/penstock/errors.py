"""The exceptions of Penstock.

    PenstockError
    ├── Fatal                     the process must end; its supervisor restarts it
    │   ├── SettingsError         a setting is missing, or two contradict each other
    │   ├── OtherDeployment       the gateway belongs to another deployment than the directory's
    │   ├── CannotStart           a package, port, directory or table is missing or unusable
    │   ├── KafkaRefused          Kafka rejects the credentials or denies a permission
    │   ├── SessionLost           the Kafka group, the PostgreSQL session or a lock is lost
    │   └── Stalled               there is work but no progress
    ├── Unavailable               a server does not answer: retry
    │   ├── KafkaUnavailable
    │   ├── PostgresUnavailable
    │   │   └── LockConflict      another transaction's locks ended the statement
    │   ├── ObjectsUnavailable
    │   ├── GatewayUnavailable
    │   └── Throttled             too many requests: retry after a delay
    ├── Invalid                   the input is wrong: do not retry
    │   ├── InvalidRecord         a record or body breaks its contract
    │   │   └── Malformed         it is not UTF-8 or not JSON
    │   ├── UnknownType           the task type is not registered
    │   ├── TooLarge              it exceeds a limit
    │   ├── RecordsRefused        Kafka refuses some records, and would refuse them again
    │   ├── ValueRefused          PostgreSQL cannot store a value
    │   └── CorruptObject         an object differs from its reference
    ├── NotFound                  nothing has this id
    ├── Conflict                  the current state does not allow the request
    ├── Unauthenticated           the request has no valid credentials
    └── Forbidden                 the credentials do not permit the request

The class decides how to fail: `Unavailable` is retried, `Invalid` is reported to the sender and
rejected, `Fatal` ends the process. Each adapter translates the exceptions of its driver into these.
"""

from __future__ import annotations

from collections.abc import Mapping


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]} …"


def reason_of(error: BaseException) -> str:
    """The short text of a failed connection: an HTTP client's own has its connection key."""
    error = getattr(error, "os_error", error)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class PenstockError(Exception):
    """The base of all exceptions that Penstock raises."""


class Fatal(PenstockError):
    """The process must end, because it can no longer act safely."""


class SettingsError(Fatal):
    """A setting is missing, malformed or contradicts another; the message names every one."""


class OtherDeployment(Fatal):
    """The gateway belongs to another deployment than the request is for; it did nothing."""


class CannotStart(Fatal):
    """A package, port, directory or table is missing or unusable; the message says what to do."""


class KafkaRefused(Fatal):
    """Kafka rejects the credentials or denies a permission; the message says what to change."""


class SessionLost(Fatal):
    """A session that entitles this process to act (consumer group, lock, connection) has ended."""


class Stalled(Fatal):
    """There is work, and none of it has progressed within PENSTOCK_STALL_TIMEOUT_S."""


class Unavailable(PenstockError):
    """A server did not answer or refused temporarily; the same request may succeed later."""


class KafkaUnavailable(Unavailable):
    """No Kafka broker answered, or the cluster refused temporarily."""


class PostgresUnavailable(Unavailable):
    """PostgreSQL did not answer, or it is starting, stopping or out of connections."""


class LockConflict(PostgresUnavailable):
    """PostgreSQL ended a statement that met the locks of another transaction; it had no effect.

    The cause is a deadlock, a serialization failure or a lock that was not free in time.
    """


class ObjectsUnavailable(Unavailable):
    """The object store did not answer."""


class GatewayUnavailable(Unavailable):
    """No gateway answers at the address, or the gateway could not reach Kafka or PostgreSQL."""


class Throttled(Unavailable):
    """Too many requests at once: the request had no effect and may be repeated after a delay.

    Attributes:
        retry_after_s: seconds to wait before the repetition.
    """

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Invalid(PenstockError):
    """The input is wrong, and a repetition cannot succeed.

    Attributes:
        reason: one sentence for the sender.
        pointer: JSON Pointer (RFC 6901) to the wrong field; "" is the whole document.
    """

    def __init__(self, reason: str, *, pointer: str = "") -> None:
        # Either may quote the input, and rejections and logs must have a bound.
        self.reason = _shorten(reason, 2_000)
        self.pointer = _shorten(pointer, 500)
        super().__init__(f"{self.pointer}: {self.reason}" if self.pointer else self.reason)


class InvalidRecord(Invalid):
    """A record or request body breaks its contract."""


class Malformed(InvalidRecord):
    """The input is not UTF-8, not JSON, or not in its declared encoding."""


class UnknownType(Invalid):
    """The task type is not registered."""


class TooLarge(Invalid):
    """The input exceeds a limit, which the message states."""


class RecordsRefused(Invalid):
    """Kafka refuses some records, and would refuse them again; it has all others of the same call.

    Attributes:
        records: Kafka's reason, by the record's position in the call.
    """

    def __init__(self, reason: str, *, records: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.records = records or {}


class ValueRefused(Invalid):
    """PostgreSQL cannot store a value of the statement, which had no effect."""


class CorruptObject(Invalid):
    """An object does not match its reference, or the reference is no context's."""


class NotFound(PenstockError):
    """Nothing has this id."""


class Conflict(PenstockError):
    """The current state of the task, type or target does not allow the request."""


class Unauthenticated(PenstockError):
    """The request has no valid API key or bearer token."""


class Forbidden(PenstockError):
    """The credentials do not permit the request: another role or namespace is needed."""
