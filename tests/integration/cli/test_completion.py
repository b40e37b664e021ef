"""Completion of shells: verbs without a server, names from a real gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.integration.cli.test_cli import penstock
from tests.support.invoking import Invoke

from penstock.cli import names
from penstock.cli.main import cli
from penstock.client import Client

__all__ = ["penstock"]  # fixture


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway in the loop of a test answers later than one of its own."""
    monkeypatch.setattr(names, "ANSWER_S", 30.0)


def complete(*words: str) -> list[str]:
    """The words that a bash offers after these; the last one is incomplete."""
    line = " ".join(["penstock", *words])
    found = CliRunner().invoke(
        cli,
        prog_name="penstock",
        env={"_PENSTOCK_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))},
    )
    assert found.exit_code == 0, found.output
    assert found.stderr == ""
    return [each.partition(",")[2] for each in found.stdout.splitlines() if each]


async def test_names_come_from_the_gateway(penstock: Invoke) -> None:
    """O8: task types, flows, schedules and targets, by argument and by option."""
    url = os.environ["PENSTOCK_GATEWAY"]
    async with Client(url) as client:
        await client.register_type("report")
        await client.put_flow_definition(
            {"flow": "nightly", "version": 1, "nodes": {"load": {"kind": "task", "type": "media"}}}
        )
        await client.put_schedule("at-two", flow="nightly", cron="0 2 * * *", paused=True)
        await client.submit("media", callbacks=["https://shop.example/hook"])
        await client.disable_target("https://audit.example/hook", "test")

    async def completed(*words: str) -> list[str]:
        return await asyncio.to_thread(complete, *words)

    assert await completed("submit", "") == ["media", "report"]
    assert await completed("submit", "r") == ["report"]
    assert await completed("submit", "none") == []
    assert await completed("list", "--type", "") == ["media", "report"]
    assert await completed("list", "--state", "fa") == ["failed"]
    assert await completed("types", "pause", "m") == ["media"]
    assert await completed("types", "keys", "set", "m") == ["media"]
    assert await completed("tasks", "cancel", "--type", "m") == ["media"]
    assert await completed("workers", "--type", "m") == ["media"]
    assert await completed("flows", "submit", "") == ["nightly"]
    assert await completed("flows", "versions", "n") == ["nightly"]
    assert await completed("schedules", "pause", "") == ["at-two"]
    assert await completed("targets", "enable", "https://a") == ["https://audit.example/hook"]
    # The options of the line name the gateway.
    unreachable = ("--gateway", "http://127.0.0.1:1")
    assert await completed("submit", *unreachable, "") == []
    os.environ["PENSTOCK_GATEWAY"] = "http://127.0.0.1:1"
    assert await completed("submit", "--gateway", url, "") == ["media", "report"]


def test_verbs_and_options_need_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: and nothing is printed when none answers, or the settings are wrong."""
    for wrong in ("http://127.0.0.1:1", "no url"):
        monkeypatch.setenv("PENSTOCK_GATEWAY", wrong)
        assert complete("sub") == ["submit"]
        assert complete("flows", "sub") == ["submit"]
        assert "--idempotency-key" in complete("submit", "--i")
        assert complete("submit", "") == []
        assert complete("completion", "") == ["bash", "zsh", "fish"]
    monkeypatch.setenv("PENSTOCK_DATA_DIR", "/nowhere")
    monkeypatch.delenv("PENSTOCK_GATEWAY")
    assert complete("submit", "") == []


def test_verbs_are_completed_without_their_imports() -> None:
    """O8: an import of each verb would take half a second at each key."""
    code = (
        "import sys; from penstock.cli.main import cli; "
        "import click; items = cli.shell_complete(click.Context(cli), 's'); "
        "print([item.value for item in items], 'aiohttp' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['schedules', 'status', 'submit'] False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_works_in_it(shell: str, tmp_path: Path) -> None:
    """O8: what `penstock completion` prints makes a real shell complete a verb."""
    script = CliRunner().invoke(cli, ["completion", shell])
    assert script.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in script.stdout
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"this machine has no {shell}")
    asks = {
        "bash": 'COMP_WORDS=(penstock subm); COMP_CWORD=1; _penstock_completion penstock; echo "${COMPREPLY[@]}"',
        "zsh": "whence -w _penstock_completion && echo submit",
        "fish": "complete -C 'penstock subm'",
    }
    (tmp_path / "script").write_text(script.stdout + "\n" + asks[shell] + "\n")
    prelude = (
        ["-c", f"autoload -U compinit && compinit -u; source {tmp_path / 'script'}"] if shell == "zsh" else []
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        [program, *(prelude or [str(tmp_path / "script")])],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        check=True,
    )
    assert "submit" in ended.stdout
