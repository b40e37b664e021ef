"""The commands of the tutorials, as a reader types them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.discovery import running
from tests.support.docs_commands import DOCS
from tests.support.waiting import wait_until

PAGE = (DOCS / "tutorial.md").read_text()
NIGHTLY = (DOCS / "tutorials" / "nightly.md").read_text()
TESTING = (DOCS / "tutorials" / "testing.md").read_text()
# These run until they are stopped.
SERVERS = ("penstock up", "python letters.py", "python worker.py")
# A task or flow of these commands fails, as the page says.
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


async def printed_by(command: str, folder: Path, *, fails: bool | None = None) -> str:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == int(command in FAILING if fails is None else fails), f"{command}: {printed}"
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


def written_files(page: str) -> dict[str, str]:
    """The files that a reader saves, with the parts that are added to them."""
    files: dict[str, str] = {}
    name = ""
    for saved, added, block in re.findall(
        r"Save this as `([\w.]+)`|(Add (?:this test|these tests))|```(?:python|ini)\n(.*?)```",
        page,
        re.DOTALL,
    ):
        if saved:
            name = saved
        elif added:
            name = "test_orders.py"
        else:
            files[name] = files.get(name, "") + "\n\n" + block
    return files


@pytest.mark.parametrize(
    ("tests", "passed"), [("test_orders.py", 6), pytest.param("test_for_real.py", 1, marks=pytest.mark.long)]
)
async def test_the_tests_of_the_tutorial_pass(tmp_path: Path, tests: str, passed: int) -> None:
    """The tests that a reader writes, in memory and on a deployment that they start."""
    files = written_files(TESTING)
    assert list(files) == ["orders.py", "pytest.ini", "test_orders.py", "test_for_real.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text.lstrip())
    assert f"    pytest -q {tests}\n" in TESTING
    printed = await printed_by(f"pytest -q {tests}", tmp_path)
    assert f"{passed} passed" in printed


@pytest.mark.long  # the demo runs the same flow by the client
async def test_the_nightly_flow_fails_is_recovered_and_approved(tmp_path: Path) -> None:
    """F1 to F4: the commands of the page lead a flow through a failure, a recovery and an approval.
    `ID` is the id that `submit` printed."""
    install, *commands = re.findall(r"^    (\S.*)$", NIGHTLY, re.MULTILINE)
    assert install.startswith("make install && cp -r examples/nightly ")
    folder = tmp_path / "nightly"
    shutil.copytree(DOCS.parent / "examples" / "nightly", folder)
    flow_id, printed = "", []
    async with AsyncExitStack() as stack:
        for command in commands:
            if command in SERVERS:
                await stack.enter_async_context(server(command, folder))
                await wait_until(lambda: running(folder / ".penstock"), timeout=180)
                continue
            written = command.replace("ID", flow_id).replace("/tmp/nightly-files", str(tmp_path / "files"))
            if "TASK" in written:
                [task_id] = re.findall(r"task (\d+), failed", printed[-1][1])
                written = written.replace("TASK", task_id)
            # The flow fails until it is recovered.
            fails = "flows watch" in command and not any("recover" in said for said, _ in printed)
            printed.append((command, await printed_by(written, folder, fails=fails)))
            if found := re.match(r"flow (\d+) submitted", printed[-1][1]):
                flow_id = found[1]
    outputs = dict(printed)
    assert "shop-3.csv is damaged" in outputs["penstock get TASK"]
    assert outputs["cat /tmp/nightly-files/report-2026-11-23.published.txt"] == (
        "Sales on 2026-11-23: 630\nApproved by ana\n"
    )
    assert "clean: nothing is in limbo" in outputs["penstock check"]
