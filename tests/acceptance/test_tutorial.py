"""The commands of the tutorial, as a reader types them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from penstock.discovery import running
from tests.support.docs_commands import DOCS
from tests.support.waiting import wait_until

PAGE = (DOCS / "tutorial.md").read_text()
# These run until they are stopped.
SERVERS = ("penstock up", "python letters.py")
# A task of these commands fails, as the page says.
FAILING = (
    """penstock submit letters --context '{"text": ""}' --watch""",
    "penstock submit letters --context '{}' --watch",
)


def environment() -> Mapping[str, str]:
    # Without the variables of this run, a deployment is found by its directory.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    cache = {name: value for name, value in os.environ.items() if name == "PENSTOCK_CACHE"}
    return {**kept, **cache, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@asynccontextmanager
async def server(command: str, folder: Path):
    """Runs a command in the folder until the end of the block."""
    with (folder / f"{command.rsplit(maxsplit=1)[-1]}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *command.split(), cwd=folder, env=environment(), stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def printed_by(command: str, folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == (1 if command in FAILING else 0), f"{command}: {printed}"
    return printed


async def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    """Each command of the page succeeds in its order; `ID` is the id that `submit` printed last."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "letters.py").write_text(program)
    install, *commands = re.findall(r"^    (\S.*)$", PAGE.replace(program, ""), re.MULTILINE)
    assert install.startswith("make install")
    task_id, printed = "", {}
    async with AsyncExitStack() as stack:
        for command in commands:
            if command in SERVERS:
                await stack.enter_async_context(server(command, tmp_path))
                await wait_until(lambda: running(tmp_path / ".penstock"), timeout=180)
                continue
            written = command.replace("ID", task_id)
            printed[command] = await printed_by(written, tmp_path)
            if found := re.match(r"task (\d+) submitted", printed[command]):
                task_id = found[1]
    assert len(task_id) == 14
    assert "KeyError" in printed["penstock get ID"]
    assert "clean: nothing is in limbo" in printed["penstock check"]
