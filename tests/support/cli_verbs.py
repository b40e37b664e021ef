"""All verbs of the command line, for tests that walk them."""

from __future__ import annotations

from collections.abc import Iterator

import click


def verbs(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Each verb that takes --json."""
    context = click.Context(group)
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        assert verb is not None
        if isinstance(verb, click.Group):
            yield from verbs(verb, (*path, name))
        if any("--json" in parameter.opts for parameter in verb.params):
            yield (*path, name), verb


def value(parameter: click.Parameter) -> str:
    """A text that the parameter takes."""
    kind = type(parameter.type).__name__
    if isinstance(parameter.type, click.Choice):
        return str(parameter.type.choices[0])
    return {"Whole": "7", "IntRange": "7", "Moment": "2026-01-01", "_RateOrNone": "5"}.get(kind, "abc")
