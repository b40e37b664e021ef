"""Runs commands of the docs as a reader does."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
from pathlib import Path

from penstock.local.database import server_binaries

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str, name: str) -> str:
    """Returns the code block of `page` that follows `<!-- executed: name -->`."""
    found = re.search(
        rf"<!-- executed: {name} -->\n *```bash\n(.*?)\n *```", (DOCS / page).read_text(), re.DOTALL
    )
    assert found is not None, f"{page} has no block {name}"
    return textwrap.dedent(found[1])


async def execute(page: str, name: str, **environment: str) -> str:
    """Runs the block in bash, which stops at the first command that fails; returns the output."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", commands(page, name)),
        env={
            **os.environ,
            "PATH": f"{server_binaries()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()
