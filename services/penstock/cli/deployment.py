"""Finds the deployment of a verb by its options, the environment or a running `penstock up`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from penstock.discovery import DATA_DIR_VARIABLE, absolute, data_dir_here, local_environment
from penstock.errors import Fatal, SettingsError, Unavailable
from penstock.settings import ADDRESSES, ENVIRONMENT_PREFIX, Settings

_DATA_DIR = "penstock.data_dir"

Kind = TypeVar("Kind", bound=Settings)


def _remember(ctx: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    # Only this module reads the value, so the context of the command carries it instead of an
    # argument of each verb.
    if value is not None:
        ctx.meta[_DATA_DIR] = value


data_dir_option = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    expose_value=False,
    callback=_remember,
    metavar="DIR",
    help="The data directory of the deployment that `penstock up` runs. "
    f"Default: ${DATA_DIR_VARIABLE}, or else .penstock",
)


def given_data_dir() -> Path | None:
    """The directory of --data-dir; None without the option."""
    found: Path | None = click.get_current_context().meta.get(_DATA_DIR)
    return found


def environment(*names: str, given: Mapping[str, Any] | None = None, required: bool = True) -> dict[str, str]:
    """The variables that name the deployment's servers.

    The option --data-dir overrides the environment, and the environment overrides a deployment in
    the default directory.

    Args:
        names: settings that name a deployment; with one of them given or in the environment, a
            stopped deployment in the default directory is ignored.
        given: options of the command line.
        required: refuse the default addresses, at which another deployment may listen.

    Raises:
        SettingsError: no deployment runs in the directory of --data-dir, the deployment in the
            default directory is stopped, or nothing names a deployment.
    """
    layers = _layers(names, given or {}, required=required)
    return {name: value for layer in reversed(layers) for name, value in layer[1].items()}


def _layers(
    names: Sequence[str], given: Mapping[str, Any], *, required: bool = True
) -> list[tuple[str, Mapping[str, str]]]:
    """Sources of variables with their descriptions; the first that has a variable decides."""
    data_dir = given_data_dir()
    variables = {name: value for name, value in os.environ.items() if value}
    if data_dir is not None:
        return [(f"the deployment in {absolute(data_dir)}", local_environment(data_dir)), ("", variables)]
    named = any(given.get(name) or variables.get(ENVIRONMENT_PREFIX + name.upper()) for name in names)
    local = local_environment(required=required and not named)
    if required and not named and not local:
        raise SettingsError(
            f"no `penstock up` runs in {data_dir_here()}, and another deployment may listen at the default addresses: "
            f"start one, or name one by its directory (--data-dir or {DATA_DIR_VARIABLE}), its gateway (--gateway or "
            "PENSTOCK_GATEWAY) or its servers (PENSTOCK_KAFKA, PENSTOCK_POSTGRES)"
        )
    return [("", variables), (f"the deployment in {data_dir_here()}", local)]


class DeploymentSettings(Generic[Kind]):
    """The settings of a deployment, and the source of each.

    Args:
        kind: class of the settings.
        options: options of the command line, which override `environment`.
        connects: whether the verb uses servers, so that one of them must be named.

    Attributes:
        settings: the settings.

    Raises:
        SettingsError: a setting is wrong, the deployment of this directory is stopped, or nothing
            names a deployment.
    """

    def __init__(self, kind: type[Kind], options: Mapping[str, Any], *, connects: bool = True) -> None:
        self._options = options
        self._layers = _layers(ADDRESSES, options, required=connects)
        found = environment(*ADDRESSES, given=options, required=connects)
        self.settings: Kind = kind.load(found, **options)

    @contextmanager
    def explaining_errors(self, *names: str) -> Iterator[Kind]:
        """Yields the settings; adds the source of the named settings to an error, as a note."""
        try:
            yield self.settings
        except (Unavailable, Fatal) as error:
            sources = {name: self._source(name) for name in names}
            if "the default" in sources.values():
                options = " and ".join(f"--{name}" for name in names)
                error.add_note(
                    f"no `penstock up` runs in {data_dir_here()}: name its directory with --data-dir or "
                    f"{DATA_DIR_VARIABLE}, or servers with {options}"
                )
            error.add_note("; ".join(f"{name} is {source}" for name, source in sources.items()))
            raise

    def _source(self, name: str) -> str:
        if self._options.get(name) is not None:
            return f"the value of --{name}"
        variable = ENVIRONMENT_PREFIX + name.upper()
        for description, layer in self._layers:
            if layer.get(variable):
                return f"that of {description}" if description else f"the value of {variable}"
        return "the default"
