"""Finds the files of `schemas/`, at the top of the repository or inside an installed wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_INSTALLED = Path(__file__).parent / "schemas"
_REPOSITORY = Path(__file__).parents[3] / "schemas"


@cache
def schemas_folder() -> Path:
    """The folder with messages/, http/ and postgres/."""
    return _INSTALLED if _INSTALLED.is_dir() else _REPOSITORY
