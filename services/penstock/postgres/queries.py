"""Named queries: `schemas/postgres/queries/<file>.sql`, each query behind a line `-- name: <name>`."""

from __future__ import annotations

import re
from functools import cache

from penstock.contracts.files import schemas_folder

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load(file: str) -> dict[str, str]:
    """All queries of one file, by name."""
    text = (schemas_folder() / "postgres" / "queries" / f"{file}.sql").read_text()
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def query(name: str) -> str:
    """One query, named `<file>.<name>`."""
    file, _, short = name.partition(".")
    return load(file)[short]
