"""Finding the deployment that a verb is about: by its options, the environment, or the data directory of a `penstock up`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from penstock.discovery import DATA_DIR_VARIABLE, data_dir_here, local_environment
from penstock.errors import Fatal, Unavailable
from penstock.settings import ENVIRONMENT_PREFIX, Settings

_DATA_DIR = "penstock.data_dir"

Kind = TypeVar("Kind", bound=Settings)


def _remember(ctx: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    # In the context, so that the verbs need no argument for what only this module reads.
    if value is not None:
        ctx.meta[_DATA_DIR] = value


data_dir_option = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    expose_value=False,
    callback=_remember,
    metavar="DIR",
    help="Ask the deployment that `penstock up` runs with this --data-dir. "
    f"Default: ${DATA_DIR_VARIABLE}, else .penstock",
)


def environment() -> dict[str, str]:
    """The variables that lead to the deployment.

    A --data-dir on the command line wins over the environment, which wins over a deployment that is merely there.

    Raises:
        SettingsError: a data directory was named in which no deployment runs.
    """
    return {name: value for layer in reversed(_layers()) for name, value in layer[1].items()}


def _layers() -> list[tuple[str, Mapping[str, str]]]:
    """What leads to the deployment, in words and as variables; the first that has a variable wins."""
    given: Path | None = click.get_current_context().meta.get(_DATA_DIR)
    variables = {name: value for name, value in os.environ.items() if value}
    if given is not None:
        return [(f"the deployment in {given.absolute()}", local_environment(given)), ("", variables)]
    return [("", variables), (f"the deployment in {data_dir_here()}", local_environment())]


class Found(Generic[Kind]):
    """Settings of a kind, and where they come from.

    Args:
        kind: of settings.
        given: options of the command line.

    Attributes:
        settings: options first, then as `environment` says.

    Raises:
        SettingsError: they make no sense.
    """

    def __init__(self, kind: type[Kind], given: Mapping[str, Any]) -> None:
        self._given = given
        self._layers = _layers()
        self.settings: Kind = kind.load(environment(), **given)

    @contextmanager
    def telling(self, *names: str) -> Iterator[Kind]:
        """Lets an error tell where each of some settings comes from, and how to name another deployment."""
        try:
            yield self.settings
        except (Unavailable, Fatal) as error:
            origins = {name: self._origin(name) for name in names}
            error.add_note("; ".join(f"{name} is {origin}" for name, origin in origins.items()))
            if "the default" in origins.values():
                options = " and ".join(f"--{name}" for name in names)
                error.add_note(
                    f"no `penstock up` runs in {data_dir_here()}: name its directory with --data-dir or "
                    f"{DATA_DIR_VARIABLE}, or servers with {options}"
                )
            raise

    def _origin(self, name: str) -> str:
        if self._given.get(name) is not None:
            return f"as --{name} says"
        variable = ENVIRONMENT_PREFIX + name.upper()
        for words, layer in self._layers:
            if layer.get(variable):
                return f"that of {words}" if words else f"as {variable} says"
        return "the default"
