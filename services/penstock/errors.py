"""The exceptions of Penstock.

    PenstockError
    ├── Fatal                     the service must stop, and all but SessionLost end its process
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
    │   ├── InvalidExpression     an expression cannot be compiled or evaluated
    │   ├── Faults                one document has several faults
    │   ├── UnknownType           the task type is not registered
    │   ├── UnknownFlow           the flow definition, or its version, is not uploaded
    │   ├── TooLarge              it exceeds a limit
    │   ├── RecordsRefused        Kafka refuses some records, and would refuse them again
    │   ├── ValueRefused          PostgreSQL cannot store a value
    │   └── CorruptObject         an object differs from its reference
    ├── CommandFailed             a command that a handler ran has failed
    ├── NotFound                  nothing has this id
    ├── Conflict                  the current state does not allow the request
    │   └── RecoveryRefused       a flow cannot be recovered now
    ├── Unauthenticated           the request has no valid credentials
    └── Forbidden                 the credentials do not permit the request

The class decides how to fail: `Unavailable` is retried, `Invalid` is reported to the sender and
rejected, `Fatal` ends the process, except for `SessionLost`, after which a service begins again in
its process. Each adapter translates the exceptions of its driver into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
    """A session that entitles a process to act has ended: of a group, a lock or a connection."""


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

    @property
    def faults(self) -> Sequence[Invalid]:
        """The faults, in the order of the document: itself, unless it is `Faults`."""
        return [self]

    @property
    def reasons(self) -> str:
        """The reasons of all faults, each but the first with its pointer; 2,000 characters."""
        first, *others = self.faults
        return _shorten("; ".join([first.reason, *map(str, others)]), 2_000)


class Faults(Invalid):
    """One document has several faults (`faults`); reason and pointer are those of the first."""

    def __init__(self, faults: Sequence[Invalid]) -> None:
        first = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(first.reason + more, pointer=first.pointer)
        self._faults = list(faults)

    @property
    def faults(self) -> Sequence[Invalid]:
        """The faults, in the order of the document."""
        return self._faults


def one_or_all(faults: Sequence[Invalid]) -> Invalid:
    """One error for at least one fault."""
    return faults[0] if len(faults) == 1 else Faults(faults)


class InvalidRecord(Invalid):
    """A record or request body breaks its contract."""


class Malformed(InvalidRecord):
    """The input is not UTF-8, not JSON, or not in its declared encoding."""


class InvalidExpression(Invalid):
    """An expression of a flow definition cannot be compiled, or not be evaluated.

    Attributes:
        expression: its text.
        line, column: the place in the expression, from 1; 0 when it is not known.
    """

    def __init__(self, reason: str, *, expression: str = "", line: int = 0, column: int = 0) -> None:
        super().__init__(reason)
        self.expression = _shorten(expression, 2_000)
        self.line = line
        self.column = column

    def __str__(self) -> str:
        place = f" at {self.line}:{self.column}" if self.line else ""
        return f"{self.reason}{place} in {_shorten(self.expression, 200)!r}"


class IdempotencyConflict(Invalid):
    """The idempotency key was used with another context, and the type refuses that."""


class UnknownType(Invalid):
    """The task type is not registered."""


class UnknownFlow(Invalid):
    """The flow definition, or its version, is not uploaded."""


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


class NotSucceeded(PenstockError):
    """A task or flow has ended without success, so it has no result.

    Attributes:
        id: its id.
        state: its final state.
    """

    def __init__(self, message: str, id_: int = 0, state: str = "") -> None:
        super().__init__(message)
        self.id = id_
        self.state = state


class CommandFailed(PenstockError):
    """A command that a handler ran (`Task.run`) has failed; the message has its last lines.

    Attributes:
        exit_code: its status; negative is the number of the signal that ended it.
        last_lines: the last lines of its output, at most 20.
    """

    def __init__(self, message: str, *, exit_code: int = 0, last_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.last_lines = tuple(last_lines)


class Conflict(PenstockError):
    """The current state of the task, type or target does not allow the request."""


class RecoveryRefused(Conflict):
    """A flow cannot be recovered now; the message says what to do.

    Attributes:
        code: `cancelling`, `timing_out`, `nothing_to_recover`, `node_running`, `unknown_node`,
            `node_changed`, `child_flow` or `in_history`.
        nodes: the nodes that are in the way.
    """

    def __init__(self, reason: str, *, code: str = "", nodes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.code = code
        self.nodes = tuple(nodes)


class RerunRefused(Conflict):
    """A task cannot be run again from a stage; the message says why.

    Attributes:
        code: `not_ended`, `stage_not_reached`, `input_not_kept`, `input_missing` or `of_flow`.
    """

    def __init__(self, reason: str, *, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Unauthenticated(PenstockError):
    """The request has no valid API key or bearer token."""


class Forbidden(PenstockError):
    """The credentials do not permit the request: another role or namespace is needed."""
