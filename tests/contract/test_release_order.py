"""The order of release is one list; indexes and statements have no other."""

from __future__ import annotations

import re

import pytest

from penstock.contracts.files import schemas_folder
from penstock.core.release_order import KEYS

FOLDER = schemas_folder() / "postgres"
# The columns before the place within a level: the keys of a page are read in the order of keys.
INDEXES = {"task_release": (), "task_release_begun": (), "task_release_key": ("key",)}


@pytest.mark.parametrize(("index", "between"), INDEXES.items())
def test_an_index_of_the_release_has_the_order_of_the_keys(index, between):
    """S3: the statements of the release read an index, so it has the order of `KEYS`."""
    level, *place = (key.sql.replace("{t}", "") for key in KEYS)
    [columns] = re.findall(
        rf"INDEX {index} ON penstock\.task USING btree \((.*?)\) (?:INCLUDE|WHERE)",
        (FOLDER / "schema.sql").read_text(),
    )
    assert columns.replace("COALESCE", "coalesce") == ", ".join(["type", level, *between, *place])


def test_no_statement_spells_the_order_of_release():
    """S3: a new key of the order is one line, because every statement takes it from `KEYS`."""
    spelled = [
        f"{path.name}: {line.strip()}"
        for path in sorted((FOLDER / "queries").glob("*.sql"))
        for line in path.read_text().splitlines()
        if re.search(r"coalesce\((\w+\.)?flow_priority", line)
    ]
    assert not spelled
