"""The console's types are those of the API description."""

from __future__ import annotations

import os
from pathlib import Path

from infra.console_types import type_script

FILE = Path(__file__).parents[2] / "services" / "console" / "src" / "lib" / "api-types.ts"


def test_the_types_of_the_console_are_fresh() -> None:
    """`PENSTOCK_WRITE_DOCS=1` writes them."""
    written = type_script()
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        FILE.write_text(written)
    assert FILE.read_text() == written
