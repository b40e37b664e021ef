"""Every exception Penstock raises on purpose.

    PenstockError
    ├── Fatal                     the process must not go on; its supervisor restarts it
    │   ├── SettingsError         a setting is missing or two contradict each other
    │   ├── CannotStart           something that must be there first is missing or refuses
    │   ├── KafkaRefused          Kafka does not know who this is, or does not permit what it asks
    │   ├── SessionLost           the Kafka group, the PostgreSQL session or a lock is gone
    │   └── Stalled               there is work and no progress
    ├── Unavailable               a server does not answer: worth trying again
    │   ├── KafkaUnavailable
    │   ├── PostgresUnavailable
    │   ├── ObjectsUnavailable
    │   └── GatewayUnavailable
    ├── Invalid                   somebody's input is wrong: never worth trying again
    │   ├── InvalidRecord         a record or body breaks its contract
    │   │   └── Malformed         it cannot even be read: not UTF-8, not JSON
    │   ├── UnknownType           no task type of that name
    │   ├── TooLarge              beyond a limit that a setting states
    │   └── CorruptObject         an object is not what its reference says
    ├── NotFound                  nothing under that id
    ├── Conflict                  not possible in the state the thing is in
    ├── Unauthenticated           nobody that the gateway knows
    └── Forbidden                 somebody who may not do this

A class says which way to fail: `Unavailable` is retried, `Invalid` is reported to whoever sent it and parked,
`Fatal` ends the process. Drivers' own exceptions are translated to these once, in the adapter that uses the driver.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Something Penstock noticed and can name."""


class Fatal(PenstockError):
    """The process must stop rather than act on what it can no longer be sure of."""


class SettingsError(Fatal):
    """A setting is missing, malformed or contradicts another; the message names each."""


class CannotStart(Fatal):
    """Something that must be there first (a package, a port, a directory, a table) is missing or refuses; the message says what to do."""


class KafkaRefused(Fatal):
    """Kafka does not accept who this process says it is, or its access lists do not permit what it asks; the message says what to change."""


class SessionLost(Fatal):
    """A session that gave this process its right to act (group, lock, connection) has ended."""


class Stalled(Fatal):
    """There is work to do and none of it has progressed for the time a setting allows."""


class Unavailable(PenstockError):
    """A server did not answer or refused for now; the same request may succeed later."""


class KafkaUnavailable(Unavailable):
    """No broker answered, or the cluster refused for now."""


class PostgresUnavailable(Unavailable):
    """The database did not answer, or is starting, stopping or out of connections."""


class ObjectsUnavailable(Unavailable):
    """The object store did not answer."""


class GatewayUnavailable(Unavailable):
    """No gateway answers at the address, or it could not reach what is behind it."""


class Throttled(Unavailable):
    """Too much at once: nothing was taken, and the same request is taken a little later.

    Attributes:
        retry_after_s: seconds to wait first.
    """

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Invalid(PenstockError):
    """Input that will be wrong however often it is tried.

    Attributes:
        reason: one sentence for the person who sent it.
        pointer: JSON Pointer (RFC 6901) to the field at fault; "" is the whole document.
    """

    def __init__(self, reason: str, *, pointer: str = "") -> None:
        super().__init__(f"{pointer}: {reason}" if pointer else reason)
        self.reason = reason
        self.pointer = pointer


class InvalidRecord(Invalid):
    """A record or request body breaks its contract."""


class Malformed(InvalidRecord):
    """Not UTF-8, not JSON, or not in the encoding it claims: nothing in it can be pointed at."""


class UnknownType(Invalid):
    """No task type of that name is registered."""


class TooLarge(Invalid):
    """Larger than a stated limit."""


class CorruptObject(Invalid):
    """An object's bytes do not match the digest in its reference."""


class NotFound(PenstockError):
    """Nothing exists under that id."""


class Conflict(PenstockError):
    """The request makes no sense in the state the thing is in."""


class Unauthenticated(PenstockError):
    """No API key or bearer token that holds came with the request."""


class Forbidden(PenstockError):
    """Whoever asks may not do this: another role or namespace is needed."""
