"""Adds the built console to a wheel of Penstock, for hatchling.

A wheel without it would serve no console, so it is not built. An editable installation serves the
files of `services/console/dist`, once there are any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConsoleHook(BuildHookInterface[Any]):
    """The hook that hatchling calls before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files.

        Raises:
            FileNotFoundError: the console is not built.
        """
        if version == "editable":
            return
        built = Path(self.root) / "services" / "console" / "dist"
        if not (built / "index.html").is_file():
            raise FileNotFoundError(f"{built} has no index.html: run `make console` before building a wheel")
        build_data["force_include"][str(built)] = "penstock/gateway/console_files"
