"""With --json each error of each verb is one document on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.support.cli_verbs import value, verbs

from penstock.cli import confirmation
from penstock.cli.main import cli

# Verbs that need no server, and so have no error here.
_WITHOUT_SERVER = {("roles", "sql"), ("topics", "acls"), ("status",), ("down",)}


VERBS = {path: verb for path, verb in verbs(cli) if path not in _WITHOUT_SERVER}


def document(outcome: Result) -> Any:
    """The only line of standard error; nothing else is printed."""
    [line] = outcome.stderr.splitlines()
    found = json.loads(line)
    assert found.keys() == {"error", "exit_status", "faults", "next"}
    assert found["exit_status"] == outcome.exit_code != 0
    assert found["error"]
    assert found["faults"]
    assert outcome.stdout == ""
    return found


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_each_verb_prints_its_error_as_json(path: tuple[str, ...]) -> None:
    """O8: here there is no deployment in the directory of the environment."""
    parameters = VERBS[path].params
    arguments = [value(each) for each in parameters if isinstance(each, click.Argument) and each.required]
    for each in parameters:
        if isinstance(each, click.Option) and each.required:
            arguments += [each.opts[0], value(each)]
    document(CliRunner().invoke(cli, [*path, *arguments, "--json"], input=""))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_each_verb_prints_its_misuse_as_json(path: tuple[str, ...]) -> None:
    """O8: an unknown option is named, wherever --json stands."""
    for arguments in (["--nonsense", "--json"], ["--json", "--nonsense"]):
        found = document(CliRunner().invoke(cli, [*path, *arguments]))
        # The argument of this verb may be a negative number.
        assert "--nonsense" in found["error"] or path == ("targets", "limit")
        assert (found["exit_status"], bool(found["next"])) == (2, True)


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["types", "nonsense"]])
def test_misuse_before_a_verb_is_json(arguments: list[str]) -> None:
    """O8: no verb has read its options yet."""
    assert "nonsense" in document(CliRunner().invoke(cli, [*arguments, "--json"]))["error"]


def test_an_unreachable_gateway_has_a_status_and_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: a script learns what to start."""
    monkeypatch.setattr("penstock.cli.gateway.PATIENCE_S", 0.0)
    monkeypatch.delenv("PENSTOCK_DATA_DIR")
    monkeypatch.setenv("PENSTOCK_GATEWAY", "http://127.0.0.1:1")
    found = document(CliRunner().invoke(cli, ["list", "--json"]))
    assert (found["exit_status"], bool(found["next"])) == (5, True)


def test_a_declined_confirmation_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: click alone would print Aborted! as text."""
    monkeypatch.setattr(confirmation, "is_interactive", lambda: True)

    @click.command()
    @click.option("--json", "json_", is_flag=True)
    def asks(json_: bool) -> None:
        confirmation.confirm("3 tasks would be cancelled")

    cli.add_command(asks, "asks")
    try:
        outcome = CliRunner().invoke(cli, ["asks", "--json"], input="n\n")
    finally:
        del cli.commands["asks"]
    assert outcome.exit_code == 1
    # The test's terminal does not show the answer, whose line break would end the question.
    _question, _, error = outcome.stderr.partition("[y/N]:")
    assert json.loads(error)["error"] == "aborted: the answer was no"
