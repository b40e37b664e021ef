"""Reads and validates files with flow definitions, and prints their faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.output import console, counted, print_document
from penstock.cli.serving import extra
from penstock.core.flow.outline import references
from penstock.errors import InvalidRecord

if TYPE_CHECKING:
    from penstock.flows.faults import Fault

# The status of a command whose input is invalid.
REFUSED = 3

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def print_faults(file: Path, faults: Sequence[Fault], *, json_: bool) -> None:
    """Prints the faults of a file, each with its place; as JSON also that there is none."""
    if json_:
        print_document(
            {"file": str(file), "valid": not faults, "errors": [fault.to_wire() for fault in faults]}
        )
        return
    for fault in faults:
        console().print(_line(file, fault), markup=False)


def validated(files: tuple[Path, ...], types: frozenset[str] | None) -> dict[Path, tuple[Any, list[Fault]]]:
    """The definition and the faults of each file.

    Args:
        files: with several files, child flows are looked up among them.
        types: the task types that exist; None does not check them.

    Raises:
        CannotStart: the packages of the group `flows` are missing.
    """
    with extra("flows", "the validation of flows"):
        # The packages of the group `flows` are imported only by the verbs that need them.
        from penstock.flows.loading import load  # noqa: PLC0415
        from penstock.flows.validation import validate_text  # noqa: PLC0415
    texts = {file: file.read_bytes() for file in files}
    known: dict[tuple[str, int | None], Mapping[str, Any]] = {}
    for text in texts.values() if len(files) > 1 else ():
        document = load(text).document
        if _is_named(document):
            name, version = document["flow"], document["version"]
            known[name, version] = document
            newest = known.get((name, None))
            if newest is None or newest["version"] < version:
                known[name, None] = document
    return {
        file: validate_text(
            text,
            types=types,
            definitions=(lambda name, version: known.get((name, version))) if known else None,
        )
        for file, text in texts.items()
    }


def children_first(definitions: Mapping[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Valid definitions in an order in which a gateway takes them; otherwise in the order given.

    A definition is refused while one of its child flows is missing, and a child flow without a
    version is the newest one. So all versions of a flow go before the flows that run it.
    """
    files: dict[str, list[Path]] = {}
    for file in sorted(definitions, key=lambda file: definitions[file]["version"]):
        files.setdefault(definitions[file]["flow"], []).append(file)
    order: dict[Path, None] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in files and name not in begun:
            begun.add(name)
            for file in files[name]:
                for child, _ in references(definitions[file]):
                    add(child)
            order.update(dict.fromkeys(files[name]))

    for definition in definitions.values():
        add(definition["flow"])
    return ((file, definitions[file]) for file in order)


def valid(file: Path) -> Any:
    """The definition in a file.

    Raises:
        InvalidRecord: it has faults.
    """
    document, faults = validated((file,), None)[file]
    if faults:
        first = faults[0]
        error = InvalidRecord(f"{file} is invalid: {first.message}", pointer=first.pointer)
        error.add_note(f"`penstock flows validate {file}` prints {counted(len(faults), 'fault')}")
        raise error
    return document


def _is_named(document: Any) -> bool:
    """Whether another definition can refer to this one."""
    return (
        isinstance(document, dict)
        and isinstance(document.get("flow"), str)
        and isinstance(document.get("version"), int)
        and isinstance(document.get("nodes"), dict)
    )


def _line(file: Path, fault: Fault) -> str:
    place = f"{file}:{fault.line}:{fault.column}" if fault.line else str(file)
    inside = " at {}:{} of the expression".format(*fault.expression_at) if fault.expression_at else ""
    where = f" ({fault.pointer}{inside})" if fault.pointer or inside else ""
    return f"{place}: {fault.code}: {fault.message}{where}"
