"""Named queries: a file of `schemas/postgres/queries` has each after a line `-- name: <name>`.

`{{history_columns}}` in a query stands for that list of `penstock.postgres.columns`, and
`{{t.history_columns}}` for the same list with `t.` before each column.
"""

from __future__ import annotations

import re
from functools import cache

from penstock.contracts.files import schemas_folder
from penstock.postgres.columns import LISTS

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_LIST = re.compile(r"\{\{(\w+\.)?(\w+)\}\}")


@cache
def load(file: str) -> dict[str, str]:
    """Returns all queries of one file, by name."""
    text = (schemas_folder() / "postgres" / "queries" / f"{file}.sql").read_text(encoding="utf-8")
    text = _LIST.sub(lambda match: ", ".join((match[1] or "") + name for name in LISTS[match[2]]), text)
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def query(name: str) -> str:
    """Returns one query, named `<file>.<name>`."""
    file, _, short = name.partition(".")
    return load(file)[short]
