"""The command line without any server: help, exit statuses, what is read, what is missing."""

from __future__ import annotations

import asyncio
import builtins
import io
import socket
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import penstock.cli
from penstock import process
from penstock.cli.main import Failure, cli
from penstock.cli.output import fields, table
from penstock.cli.reading import Lines, callbacks_of, context_of
from penstock.client import Client
from penstock.errors import (
    CannotStart,
    Conflict,
    GatewayUnavailable,
    InvalidRecord,
    KafkaUnavailable,
    NotFound,
    PenstockError,
    SessionLost,
    SettingsError,
    TooLarge,
    UnknownType,
)
from penstock.http.problems import Faults

# What no integer of 64 bits holds.
BEYOND = "99999999999999999999"
WHOLE = (
    "--lease-ms",
    "--partitions",
    "--max-attempts",
    "--max-losses",
    "--retry-base-ms",
    "--retry-max-ms",
)
FRACTIONS = ("--retry-factor", "--retry-jitter")


def test_every_verb_explains_itself() -> None:
    """O8: each verb has a help text, and all that talk to something take --json."""
    verbs = [([name], verb) for name, verb in cli.commands.items()]
    while verbs:
        names, verb = verbs.pop()
        outcome = CliRunner().invoke(cli, [*names, "--help"])
        assert outcome.exit_code == 0
        assert verb.help
        if isinstance(verb, click.Group) and not verb.invoke_without_command:
            verbs += [([*names, name], verb) for name, verb in verb.commands.items()]
        elif names[0] not in ("up", "run"):
            assert "--json" in outcome.output, names


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRecord("x"), 3),
        (TooLarge("x"), 3),
        (Conflict("x"), 3),
        (NotFound("x"), 4),
        (GatewayUnavailable("x"), 5),
        (KafkaUnavailable("x"), 5),
        (SettingsError("x"), 6),
        (CannotStart("x"), 6),
        (SessionLost("x"), 1),
        (PenstockError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: PenstockError, status: int) -> None:
    """O8: scripts can tell what went wrong; the statuses are in the documentation of the package."""
    assert Failure(error).exit_code == status
    assert f"\n    {status} " in (penstock.cli.__doc__ or "")

    async def service(_stopping: asyncio.Event, _ready: process.Ready) -> None:
        raise error

    assert asyncio.run(process._supervise("test", service, 1.0)) == status


def test_errors_say_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    """O8: no gateway, unknown type: the next command is named; many faults are all shown, up to a point."""
    Failure(GatewayUnavailable("no gateway answers at http://x")).show()
    Failure(UnknownType("no such type", pointer="/type")).show()
    Failure(Faults([InvalidRecord("bad", pointer=f"/{n}") for n in range(25)])).show()
    told = capsys.readouterr().err
    assert "penstock up" in told
    assert "penstock types add" in told
    assert told.count(": bad") == 20
    assert "… and 5 more" in told


def test_nobody_at_the_address_ends_with_5(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """O8: the message names the address and `penstock up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.gateway.PATIENCE_S", 0.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcome = CliRunner().invoke(cli, ["types", "--gateway", url])
    assert outcome.exit_code == 5
    assert url in outcome.stderr
    assert "penstock up" in outcome.stderr


@pytest.mark.parametrize(
    "url", ["notaurl", "127.0.0.1:8420", "http://", "http://a b", "http://a:x", "ftp://a"]
)
def test_an_address_that_is_none_ends_with_6(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """O8: it is a wrong setting, not a gateway that does not answer."""
    monkeypatch.setenv("PENSTOCK_GATEWAY", url)
    outcome = CliRunner().invoke(cli, ["list"])
    assert outcome.exit_code == 6
    assert f"gateway={url!r} is not a URL: set PENSTOCK_GATEWAY" in outcome.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"],
        ["submit", "--file", "x", "--idempotency-key", "k"],
        ["submit", "media", "--priority", "URGENT"],
        ["watch"],
        ["watch", "1", "--type", "media"],
        ["cancel"],
        ["get", "0"],
        ["get", BEYOND],
        ["cancel", "1", BEYOND],
        ["watch", BEYOND],
        ["list", "--limit", BEYOND],
        ["check", "--show", BEYOND],
        ["topics", "--replication", "40000"],
        *(["types", "add", "t", option, BEYOND] for option in WHOLE),
        *(["types", "add", "t", option, "-" + BEYOND] for option in WHOLE),
        *(["types", "add", "t", option, text] for option in FRACTIONS for text in ("nan", "inf", "1e400")),
        ["run", "nothing"],
        ["nothing"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    """O8: click's own status for usage errors."""
    assert CliRunner().invoke(cli, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "media", "--context", "{oops"], "not JSON"),
        (["submit", "media", "--context", "@/nowhere"], "cannot read /nowhere"),
        (["submit", "media", "--label", "x"], "name=value"),
        (["submit", "--file", "/nowhere"], "cannot read /nowhere"),
        (["submit", "--file", "/dev/null"], "/dev/null is empty"),
        (["submit", "media", "--file", "/dev/null"], "/dev/null is empty"),
        (["submit", "media", "--file", "-"], "standard input is empty"),
        (["submit", "media", "--file", ""], "cannot read"),
    ],
)
def test_what_cannot_be_read_ends_with_3(arguments: list[str], words: str) -> None:
    """O8: refused before anything is sent."""
    outcome = CliRunner().invoke(cli, [*arguments, "--gateway", "http://127.0.0.1:1"])
    assert outcome.exit_code == 3
    assert words in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "missing", "command"),
    [
        (["migrate"], "asyncpg", "penstock[services]"),
        (["check"], "asyncpg", "penstock[services]"),
        (["history", "list"], "asyncpg", "penstock[services]"),
        (["history", "run"], "asyncpg", "penstock[services]"),
        (["up"], "jgo", "penstock[embedded]"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], missing: str, command: str
) -> None:
    """Issue 1: the worker's installation has every verb; those that need more say what."""
    real = builtins.__import__

    def without(name: str, *more: Any, **kwargs: Any) -> Any:
        if name.startswith(("penstock.postgres", "penstock.checks", "penstock.local.deployment")):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *more, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    outcome = CliRunner().invoke(cli, arguments)
    assert outcome.exit_code == 6
    assert f"needs {missing}" in outcome.stderr
    assert f"pip install '{command}'" in outcome.stderr


def test_contexts_are_read_from_text_and_files(tmp_path: Path) -> None:
    """T1: JSON is parsed, text and URLs are taken as they are, bytes travel as base64."""
    file = tmp_path / "context"
    file.write_bytes(b'{"a": 1}\xff')
    assert context_of('{"a": [1]}', "json") == {"a": [1]}
    assert context_of("plain", "text") == "plain"
    assert context_of(f"@{file}", "bytes") == "eyJhIjogMX3/"
    with pytest.raises(InvalidRecord, match="UTF-8"):
        context_of(f"@{file}", "text")
    with pytest.raises(InvalidRecord, match="not JSON"):
        context_of(f"@{file}", "json")


def test_a_fault_in_a_file_is_told_by_its_line(tmp_path: Path) -> None:
    """T5: blank lines count as lines but not as tasks, and options are defaults."""
    file = tmp_path / "tasks.ndjson"
    file.write_text('{"type": "a"}\n\n{"priority": "x"}\n[]\n')
    lines = Lines(str(file), {"type": "media"})
    assert len(lines) == 3
    tasks = iter(lines)
    assert next(tasks) == {"type": "a"}
    assert next(tasks) == {"type": "media", "priority": "x"}
    located = lines.located(InvalidRecord("no such level", pointer="/1/priority"))
    assert str(located) == f"{file}, line 3: /priority: no such level"
    with pytest.raises(InvalidRecord, match="line 4: not a JSON object"):
        next(tasks)


@pytest.mark.parametrize("content", [None, '{"url": s3cr3t}'])
def test_a_callback_file_that_is_none_is_told_without_its_content(
    tmp_path: Path, content: str | None
) -> None:
    """O8, C7: which option is wrong and why, but not what it says: that may be a secret."""
    file = tmp_path / "hook.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRecord) as refused:
        callbacks_of(["https://a.example/", f"@{file}"])
    assert refused.value.pointer == "/callbacks/1"
    assert "s3cr3t" not in refused.value.reason


def test_no_callback_option_says_nothing() -> None:
    """C1: silence leaves it to the type, `--no-callbacks` does not."""
    assert callbacks_of([]) is None
    assert callbacks_of([], none=True) == []


LONG_URL = f"https://shop.example/{'hooks/' * 20}?customer=4711"
LONG_ID = "msg_1234567890-2-0-succeeded-0"


class Terminal(io.StringIO):
    """A narrow one."""

    def isatty(self) -> bool:
        return True


def print_long(monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> str:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", out)
    table(("id", "target", "state"), [(LONG_ID, LONG_URL, "dead")])
    fields([("target", LONG_URL)])
    return click.unstyle(out.getvalue())


def test_what_is_read_by_no_person_has_ids_and_urls_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: a pipe has no width; a script that greps a table finds whole ids and URLs."""
    _heads, row, pair = print_long(monkeypatch, io.StringIO()).splitlines()
    assert row.split() == [LONG_ID, LONG_URL, "dead"]
    assert pair.split() == ["target", LONG_URL]


def test_a_narrow_terminal_folds_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: every character is there, in lines that fit."""
    shown = print_long(monkeypatch, Terminal())
    assert all(len(line.rstrip()) <= 60 for line in shown.splitlines())
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if not line.startswith("target")][1:]
    for cell in (LONG_ID, LONG_URL):
        left = cell
        for line in lines:
            for piece in line.split():
                left = left.removeprefix(piece)
        assert not left, cell


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        ("nan", "nan is not a finite number."),
        ("inf", "inf is not a finite number."),
        ("-inf", "-inf is not a finite number."),
        ("-1", "-1 is not above 0."),
        ("0", "0 is not above 0."),
        ("fast", "'fast' is not a valid"),
    ],
)
def test_a_rate_that_is_none_is_told(rate: str, why: str) -> None:
    """C6, O8: what is wrong with it, and what would be right; a negative number is no option."""
    told = CliRunner().invoke(cli, ["targets", "limit", "https://shop.example/", rate])
    assert told.exit_code == 2
    assert why in told.output
    assert "`none` for the setting of the service" in told.output
    told = CliRunner().invoke(cli, ["callbacks", "replay", "msg_1", "--rate", rate])
    assert told.exit_code == 2
    assert why in told.output


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0])
async def test_the_client_sends_no_rate_that_json_would_make_null(rate: float) -> None:
    """C6: null takes a target's limit away, and replays all at once; nothing is asked of anybody."""
    async with Client("http://127.0.0.1:9", patience_s=0) as client:
        for asking in (
            client.limit_target("https://shop.example/", rate),
            client.replay(["msg_1"], rate=rate),
        ):
            with pytest.raises(InvalidRecord, match="is not a number above 0") as refused:
                await asking
            assert refused.value.pointer == "/rate"
