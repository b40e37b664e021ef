"""The one place where the errors of all verbs end: as messages and exit statuses."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click
import orjson

import penstock
from penstock.errors import (
    CannotStart,
    GatewayUnavailable,
    NotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
    UnknownFlow,
    UnknownType,
)
from penstock.http.problems import Faults

_FAILED = 1
_PACKAGE = Path(penstock.__file__).parent

# The most faults of one request that are printed.
_MAX_FAULTS = 20


class Failure(click.ClickException):
    """An error of Penstock as click prints it.

    Args:
        error: the error.
        json_: print one JSON document: `error`, `exit_status`, `faults` and `next`, what to do.
    """

    def __init__(self, error: PenstockError, *, json_: bool = False) -> None:
        from penstock.process import exit_status  # noqa: PLC0415 (only an error needs the event loop's modules)

        super().__init__(str(error))
        self.error = error
        self.exit_code = exit_status(error)
        self._json = json_

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the error and what to do next.

        A standard error that cannot be written changes nothing about the exit status.
        """
        with suppress(OSError):
            self._show(file)

    def _show(self, file: IO[Any] | None) -> None:
        faults = self.error.faults if isinstance(self.error, Faults) else [self.error]
        hints = getattr(self.error, "__notes__", None) or _hints(self.error)
        if self._json:
            print_error(str(self.error), self.exit_code, list(map(str, faults)), list(hints))
            return
        for fault in faults[:_MAX_FAULTS]:
            click.echo(f"penstock: {fault}", file=file, err=file is None)
        if len(faults) > _MAX_FAULTS:
            click.echo(f"  … and {len(faults) - _MAX_FAULTS} more", file=file, err=file is None)
        for hint in hints:
            click.echo(f"  {hint}", file=file, err=file is None)


class Misuse(click.UsageError):
    """A usage error as one JSON document."""

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 (click's signature)
        """Prints the error."""
        help_ = [f"{self.ctx.command_path} --help"] if self.ctx else []
        print_error(self.format_message(), self.exit_code, [self.format_message()], help_)


def print_error(error: str, exit_status: int, faults: list[str], hints: list[str]) -> None:
    """Prints one document about an error on standard error."""
    document = {"error": error, "exit_status": exit_status, "faults": faults, "next": hints}
    try:
        text = orjson.dumps(document).decode()
    except TypeError:
        # A path that is not UTF-8.
        text = json.dumps(document)
    with suppress(OSError):
        sys.stderr.write(text + "\n")


_TYPES_HINT = "`penstock types` lists the types, and `penstock types add NAME` registers one"

_FLOWS_HINT = (
    "`penstock flows definitions` lists the definitions, and `penstock flows upload FILE` uploads one"
)

# The next step after a `NotFound`, by the beginning of its message. The gateway and the database
# write the messages, and neither knows the command line.
_NOT_FOUND_HINTS = {
    "there is no task type ": _TYPES_HINT,
    "there is no task ": "`penstock list` lists the newest tasks with their ids",
    "there is no flow ": "`penstock flows list` lists the newest flows with their ids",
    "there is no schedule ": "`penstock schedules list` lists the schedules",
    "there is no backfill ": "`penstock schedules backfills` lists the backfills with their ids",
    "there is no operation ": "`penstock audit` lists the operations with their ids",
    "there is no key ": "`penstock keys list` lists the API keys with their ids",
    "there is no flow definition ": _FLOWS_HINT,
    "there is no target ": "`penstock targets` lists the targets",
    "there is no namespace ": "the namespace of a type is the part of its name before the first --: `penstock types` "
    "lists the types",
}


def _hints(error: PenstockError) -> tuple[str, ...]:
    if isinstance(error, NotFound):
        return tuple(
            hint for beginning, hint in _NOT_FOUND_HINTS.items() if str(error).startswith(beginning)
        )[:1]
    if isinstance(error, GatewayUnavailable) and str(error).startswith("no gateway"):
        return (
            "start a deployment with `penstock up`; or name a running one by its directory (--data-dir or",
            "PENSTOCK_DATA_DIR) or by the address of its gateway (--gateway or PENSTOCK_GATEWAY)",
        )
    if isinstance(error, UnknownType | UnknownFlow):
        return (_FLOWS_HINT if isinstance(error, UnknownFlow) else _TYPES_HINT,)
    if isinstance(error, Unauthenticated):
        return (
            "set PENSTOCK_API_KEY to an API key of this gateway, or PENSTOCK_API_KEY_FILE to a file with one;",
            "`penstock keys create` creates an API key",
        )
    if isinstance(error, Unavailable):
        return (
            "check that the server runs, and that PENSTOCK_KAFKA and PENSTOCK_POSTGRES name the right servers",
        )
    return ()


def report(error: Exception, *, json_: bool) -> int:
    """Prints an error that no verb has expected, and returns the exit status.

    Args:
        error: any exception but a `PenstockError` or one of click.
        json_: print one JSON document.
    """
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader of a pipe has read enough, as `head` does.
        return _FAILED
    failure = Failure(_expected(error), json_=json_)
    failure.show()
    return failure.exit_code


def _expected(error: Exception) -> PenstockError:
    if isinstance(error, FileNotFoundError) and not _has_directory():
        return CannotStart("the working directory was deleted: change to another directory")
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{os.fspath(error.filename)!r}: "
        return PenstockError(f"{name}{error.strerror or error}")
    text = "".join(traceback.format_exception_only(error)).strip()
    found = PenstockError(f"internal error{_location(error)}: {text}")
    found.add_note(
        "this is a fault of Penstock: report it with the command, and with the traceback that "
        "`python -X dev -m penstock …` prints"
    )
    return found


def _has_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (the call of the system is the question)
    except FileNotFoundError:
        return False
    return True


def _location(error: Exception) -> str:
    """The innermost line of Penstock that an error came from."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_PACKAGE):
            return f" ({file.relative_to(_PACKAGE.parent)}:{frame.lineno})"
    return ""
