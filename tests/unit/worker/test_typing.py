"""Type checkers know the context of a handler by its annotation."""

import subprocess
import sys
from pathlib import Path

TYPING = Path(__file__).parents[2] / "typing"


def test_mypy_knows_the_context_of_a_handler():
    """W1: a typed context is typed for a strict checker too; `Task` alone is `Task[Any]`."""
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", *map(str, TYPING.glob("*.py"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=TYPING.parents[1],
    )
    assert found.returncode == 0, found.stdout + found.stderr
