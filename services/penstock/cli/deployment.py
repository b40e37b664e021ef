"""Finds the deployment of a verb by its options, the environment or a running `penstock up`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

from penstock.discovery import DATA_DIR_VARIABLE, absolute, data_dir_here, local_environment
from penstock.errors import Fatal, SettingsError, Unavailable
from penstock.settings import ADDRESSES, ENVIRONMENT_PREFIX, Settings

_DATA_DIR = "penstock.data_dir"

Kind = TypeVar("Kind", bound=Settings)
Layers: TypeAlias = Sequence[tuple[str, Mapping[str, str]]]


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


def gateway_address() -> str | None:
    """The address of the gateway, by --data-dir, the environment or the default directory.

    Raises:
        SettingsError: no deployment runs in the directory of --data-dir, the deployment in the
            default directory is stopped, or nothing names a deployment.
    """
    return _merged(_layers(("gateway",), {})).get("PENSTOCK_GATEWAY")


def _merged(layers: Layers) -> dict[str, str]:
    return {name: value for _, layer in reversed(layers) for name, value in layer.items()}


def _layers(names: Sequence[str], given: Mapping[str, Any], *, required: bool = True) -> Layers:
    """Sources of variables with their descriptions; the first that has a variable decides.

    Args:
        names: settings that name a deployment; with one of them given or in the environment, a
            stopped deployment in the default directory is ignored.
        given: options of the command line.
        required: refuse the default addresses, at which another deployment may listen.
    """
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


@contextmanager
def deployment_settings(kind: type[Kind], options: Mapping[str, Any], *servers: str) -> Iterator[Kind]:
    """Yields the settings of a deployment; an error of the body gets the sources of its addresses.

    Args:
        kind: class of the settings.
        options: options of the command line, which override every other source.
        servers: the settings with the addresses that the verb uses. With one, the options or the
            environment must name a deployment.

    Raises:
        SettingsError: a setting is wrong, the deployment of this directory is stopped, or nothing
            names a deployment.
    """
    layers = _layers(ADDRESSES, options, required=bool(servers))
    settings = kind.load(_merged(layers), **options)
    try:
        yield settings
    except (Unavailable, Fatal) as error:
        sources = {name: _source(name, options, layers) for name in servers}
        if "the default" in sources.values():
            named = " and ".join(f"--{name}" for name in servers)
            error.add_note(
                f"no `penstock up` runs in {data_dir_here()}: name its directory with --data-dir or "
                f"{DATA_DIR_VARIABLE}, or servers with {named}"
            )
        error.add_note("; ".join(f"{name} is {source}" for name, source in sources.items()))
        raise


def _source(name: str, options: Mapping[str, Any], layers: Layers) -> str:
    if options.get(name) is not None:
        return f"the value of --{name}"
    variable = ENVIRONMENT_PREFIX + name.upper()
    for description, layer in layers:
        if layer.get(variable):
            return f"that of {description}" if description else f"the value of {variable}"
    return "the default"
