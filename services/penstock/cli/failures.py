"""The one place where the errors of all verbs end: as messages and exit statuses."""

from __future__ import annotations

import errno
import json
import os
import traceback
from contextlib import suppress
from pathlib import Path

import click

import penstock
from penstock.errors import (
    CannotStart,
    GatewayUnavailable,
    Invalid,
    NotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
    UnknownFlow,
    UnknownType,
)

_FAILED = 1
_PACKAGE = Path(penstock.__file__).parent

# The most faults of one request that are printed.
_MAX_FAULTS = 20


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
    "there is no target ": "`penstock targets` lists the targets; name a target by its whole URL, as it was submitted",
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


def is_expected(error: Exception) -> bool:
    """Whether verbs raise the error on purpose; any other one is a fault or one of the system."""
    return isinstance(error, PenstockError | click.ClickException | click.Abort)


def report(error: Exception, *, json_: bool) -> int:
    """Prints an error and what to do next, and returns the exit status.

    A standard error that cannot be written changes nothing about the exit status.

    Args:
        error: the error that has ended the command.
        json_: print one JSON document: `error`, `exit_status`, `faults` and `next`, what to do.
    """
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader of a pipe has read enough, as `head` does.
        return _FAILED
    text, status, faults, hints = _explained(error)
    with suppress(OSError):
        if json_:
            document = {"error": text, "exit_status": status, "faults": faults, "next": hints}
            click.echo(json.dumps(document), err=True)
        elif isinstance(error, click.ClickException):
            error.show()
        elif isinstance(error, click.Abort):
            click.echo("Aborted!", err=True)
        else:
            for fault in faults[:_MAX_FAULTS]:
                click.echo(f"penstock: {fault}", err=True)
            if len(faults) > _MAX_FAULTS:
                click.echo(f"  … and {len(faults) - _MAX_FAULTS} more", err=True)
            for hint in hints:
                click.echo(f"  {hint}", err=True)
    return status


def _explained(error: Exception) -> tuple[str, int, list[str], list[str]]:
    """The text, the exit status, the faults and the next steps of an error."""
    if isinstance(error, click.Abort):
        text = "aborted: the answer was no"
        return text, _FAILED, [text], []
    if isinstance(error, click.ClickException):
        text, ctx = error.format_message(), getattr(error, "ctx", None)
        return text, error.exit_code, [text], [f"{ctx.command_path} --help"] if ctx else []
    from penstock.process import exit_status  # noqa: PLC0415 (only an error needs the event loop's modules)

    found = error if isinstance(error, PenstockError) else _expected(error)
    faults = found.faults if isinstance(found, Invalid) else [found]
    hints = getattr(found, "__notes__", None) or _hints(found)
    return str(found), exit_status(found), [str(fault) for fault in faults], [*hints]


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
