"""The command line without a server: help, exit statuses, inputs, missing packages."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import io
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import penstock.cli
from penstock import process
from penstock.cli.failures import report
from penstock.cli.groups import LazyGroup, summarize
from penstock.cli.inputs import Lines, callbacks_of, context_of
from penstock.cli.main import cli
from penstock.cli.output import fields, table
from penstock.cli.param_types import Duration, Milliseconds, Moment, Seconds
from penstock.client import Client, Submitted
from penstock.errors import (
    CannotStart,
    Conflict,
    Faults,
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

# An integer beyond 64 bits.
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


def verbs_of(group: click.Group) -> dict[str, click.Command]:
    """The verbs of a group by name, imported."""
    context = click.Context(group)
    return {name: verb for name in group.list_commands(context) if (verb := group.get_command(context, name))}


def test_every_verb_has_a_help_text() -> None:
    """O8: each verb has a help text, and each verb that uses a server takes --json."""
    verbs = [([name], verb) for name, verb in verbs_of(cli).items()]
    while verbs:
        names, verb = verbs.pop()
        outcome = CliRunner().invoke(cli, [*names, "--help"])
        assert outcome.exit_code == 0
        assert verb.help
        if isinstance(verb, click.Group) and not verb.invoke_without_command:
            verbs += [([*names, name], verb) for name, verb in verbs_of(verb).items()]
        elif names[0] not in ("up", "run", "worker", "completion"):
            assert "--json" in outcome.output, names


def test_lists_of_verbs_cut_no_summary() -> None:
    """O8: on a terminal of 80 columns each verb has a summary that ends where its sentence ends."""
    groups: list[tuple[list[str], click.Group]] = [([], cli)]
    while groups:
        names, group = groups.pop()
        listed = CliRunner().invoke(cli, [*names, "--help"], terminal_width=80).output
        assert "..." not in listed.partition("Commands:")[2], listed
        groups += [
            ([*names, name], verb) for name, verb in verbs_of(group).items() if isinstance(verb, click.Group)
        ]


def test_summaries_of_verbs_that_are_imported_on_use_are_theirs() -> None:
    """O8: a list of verbs imports none of them, and shows the beginning of each help text."""
    assert isinstance(cli, LazyGroup)
    for name, lazy in cli._verbs.items():
        verb = getattr(importlib.import_module(lazy.module), lazy.attribute)
        verb.short_help = None
        summarize(verb)
        assert lazy.summary == verb.short_help, name


def test_the_list_of_verbs_imports_no_client_and_no_event_loop() -> None:
    """O8: the command line answers before heavy modules are imported; a verb imports its own."""
    code = (
        "import sys; from click.testing import CliRunner; from penstock.cli.main import cli;"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0;"
        "print(*{'asyncio', 'aiohttp', 'aiokafka', 'rich', 'penstock.client'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_every_group_of_records_has_the_verb_list() -> None:
    """O8: `penstock GROUP list` works, also where the group alone lists."""
    # These compare a declaration with a server.
    comparing = {"topics", "roles"}
    groups = {name for name, verb in verbs_of(cli).items() if isinstance(verb, click.Group)} - comparing
    assert {"types", "targets", "tasks", "keys"} <= groups
    for name in groups:
        outcome = CliRunner().invoke(cli, [name, "list", "--help"])
        assert outcome.exit_code == 0, outcome.output
        assert "--json" in outcome.output


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["sumbit", "media"], "'submit'"),
        (["types", "lst"], "'list'"),
        (["types", "keys", "pose"], "'pause'"),
        (["nothing-like-it"], None),
    ],
)
def test_an_unknown_verb_names_the_nearest_one(words: list[str], nearest: str | None) -> None:
    """O8: a misspelt verb of any group is a usage error with a suggestion, if one is near."""
    outcome = CliRunner().invoke(cli, words)
    assert outcome.exit_code == 2
    assert "No such command" in outcome.stderr
    assert ("Did you mean" in outcome.stderr) == (nearest is not None)
    assert (nearest or "") in outcome.stderr


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
    """O8: scripts can distinguish errors; the documentation of the package lists the statuses."""
    assert report(error, json_=False) == status
    assert f"\n    {status} " in (penstock.cli.__doc__ or "")

    async def service(stopping: asyncio.Event, _ready: process.Ready) -> None:
        # Before a stop, it would begin again after an outage.
        stopping.set()
        raise error

    assert asyncio.run(process._supervise("test", service, 1.0)) == status


def test_errors_say_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    """O8: the errors name the next command, and many faults are shown up to a limit."""
    report(GatewayUnavailable("no gateway answers at http://x"), json_=False)
    report(UnknownType("no such type", pointer="/type"), json_=False)
    report(Faults([InvalidRecord("bad", pointer=f"/{n}") for n in range(25)]), json_=False)
    errors = capsys.readouterr().err
    assert "penstock up" in errors
    assert "penstock types add" in errors
    assert errors.count(": bad") == 20
    assert "… and 5 more" in errors


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-23", "2026-11-23T00:00:00"),
        ("2026-11-23T06:30", "2026-11-23T06:30:00"),
        ("2026-11-23T06:30:15Z", "2026-11-23T06:30:15+00:00"),
        ("2026-11-23T06:30+01:00", "2026-11-23T06:30:00+01:00"),
    ],
)
def test_moments_of_options(text: str, moment: str) -> None:
    """O8: seconds may be left out; without an offset a moment is local time, and has one then."""
    found = Moment().convert(text, None, None)
    assert found.tzinfo is not None
    assert found == datetime.fromisoformat(moment).astimezone(UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5_400), ("1.5h", 5_400), ("7d", 604_800), ("500ms", 0.5)],
)
def test_durations_of_options(text: str, seconds: float) -> None:
    """O8: an option of a duration, of milliseconds or seconds takes 10m; a moment counts back from
    now, or on from now."""
    assert Duration().convert(text, None, None).total_seconds() == seconds
    assert Milliseconds().convert(text, None, None) == seconds * 1_000
    assert Seconds().convert(text, None, None) == seconds
    now, span = datetime.now(UTC), timedelta(seconds=seconds)
    before, after = (Moment(ahead=ahead).convert(text, None, None) for ahead in (False, True))
    assert now - span <= before <= datetime.now(UTC) - span
    assert now + span <= after <= datetime.now(UTC) + span


@pytest.mark.parametrize("text", ["10", "m", "10 m", "10y", "0s", "-5m", "1h-5m", "999999999w", "³m"])
def test_no_durations(text: str) -> None:
    """O8: a wrong duration is a usage error."""
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


NO_MOMENT, NO_YEAR = "write 2026-11-23, 2026-11-23T06:00", "outside the years 1 to 9999 of UTC"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, NO_MOMENT) for text in ("noon", "2026-13-01", "", "-0001-01-01", "10000-01-01")),
        *((text, NO_YEAR) for text in ("0001-01-01T00:00+10:00", "9999-12-31T23:59-10:00")),
    ],
)
def test_no_moments(text: str, why: str) -> None:
    """O8: the error has examples, or says that UTC has no such year."""
    with pytest.raises(click.BadParameter, match=why):
        Moment().convert(text, None, None)


def test_an_address_without_a_gateway_ends_with_5(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_an_invalid_address_ends_with_6(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """O8: the setting is wrong, which differs from a gateway that does not answer."""
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
    """O8: usage errors have click's own status."""
    assert CliRunner().invoke(cli, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["watch"], "give the ids of the tasks, or a filter"), (["watch", "1", "--type", "media"], "not both")],
)
def test_watch_says_whether_it_got_too_little_or_too_much(arguments: list[str], words: str) -> None:
    """O8: without ids and filters, and with both, the message says what to leave out or to add."""
    assert words in CliRunner().invoke(cli, arguments).stderr


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
def test_an_unreadable_input_ends_with_3(arguments: list[str], words: str) -> None:
    """O8: the command refuses the input before it sends a request."""
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
    """O8: an installation of the SDK has every verb; a verb names the package that it
    lacks."""
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
    """T1: JSON is parsed, text and URLs stay as they are, and bytes become base64."""
    file = tmp_path / "context"
    file.write_bytes(b'{"a": 1}\xff')
    assert context_of('{"a": [1]}', "json") == {"a": [1]}
    assert context_of("plain", "text") == "plain"
    assert context_of(f"@{file}", "bytes") == "eyJhIjogMX3/"
    with pytest.raises(InvalidRecord, match="UTF-8"):
        context_of(f"@{file}", "text")
    with pytest.raises(InvalidRecord, match="not JSON"):
        context_of(f"@{file}", "json")


def test_a_fault_in_a_file_names_its_line(tmp_path: Path) -> None:
    """T5: blank lines count as lines but not as tasks, and options are defaults of each line."""
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
def test_an_error_about_a_callback_file_does_not_quote_it(tmp_path: Path, content: str | None) -> None:
    """O8, C7: the error names the option and the reason; the content may be a secret."""
    file = tmp_path / "hook.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRecord) as refused:
        callbacks_of(["https://a.example/", f"@{file}"])
    assert refused.value.pointer == "/callbacks/1"
    assert "s3cr3t" not in refused.value.reason


def test_without_a_callback_option_the_type_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: without an option the callbacks of the type apply; `--no-callbacks` means none."""
    wires: list[Mapping[str, Any]] = []

    def submit(_client: Any, wire: Mapping[str, Any]) -> Submitted:
        wires.append(wire)
        return Submitted(id=7, created=True)

    monkeypatch.setattr("penstock.cli.tasks._submit_one", submit)
    for options in ([], ["--no-callbacks"]):
        CliRunner().invoke(cli, ["submit", "media", "--json", "--gateway", "http://127.0.0.1:1", *options])
    assert [wire.get("callbacks") for wire in wires] == [None, []]


LONG_URL = f"https://shop.example/{'hooks/' * 20}?customer=4711"
LONG_ID = "msg_1234567890-2-0-succeeded-0"


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def print_long(monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> str:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", out)
    table(("id", "target", "state"), [(LONG_ID, LONG_URL, "dead")])
    fields([("target", LONG_URL)])
    return click.unstyle(out.getvalue())


def test_without_a_terminal_ids_and_urls_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: a script that searches a table in a pipe finds whole ids and URLs."""
    _heads, row, pair = print_long(monkeypatch, io.StringIO()).splitlines()
    assert row.split() == [LONG_ID, LONG_URL, "dead"]
    assert pair.split() == ["target", LONG_URL]


def test_a_narrow_terminal_wraps_cells_without_cutting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: the output has every character, in lines that fit."""
    shown = print_long(monkeypatch, Terminal())
    assert all(len(line.rstrip()) <= 60 for line in shown.splitlines())
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if not line.startswith("target")][1:]
    for cell in (LONG_ID, LONG_URL):
        remaining = cell
        for line in lines:
            for piece in line.split():
                remaining = remaining.removeprefix(piece)
        assert not remaining, cell


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
def test_an_invalid_rate_is_a_usage_error(rate: str, why: str) -> None:
    """C6, O8: the error says what is wrong and what to write; a negative rate is not an unknown
    option."""
    outcome = CliRunner().invoke(cli, ["targets", "limit", "https://shop.example/", rate])
    assert outcome.exit_code == 2
    assert why in outcome.output
    assert "`none` for the setting of the service" in outcome.output
    outcome = CliRunner().invoke(cli, ["callbacks", "replay", "msg_1", "--rate", rate])
    assert outcome.exit_code == 2
    assert why in outcome.output


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0])
async def test_the_client_refuses_a_rate_that_json_turns_into_null(rate: float) -> None:
    """C6: null removes a target's limit, or replays all callbacks at once; no request is sent."""
    async with Client("http://127.0.0.1:9", patience_s=0) as client:
        for coroutine in (
            client.limit_target("https://shop.example/", rate),
            client.replay(["msg_1"], rate=rate),
        ):
            with pytest.raises(InvalidRecord, match="is not a number above 0") as refused:
                await coroutine
            assert refused.value.pointer == "/rate"


def test_up_asks_before_it_deletes(tmp_path: Path) -> None:
    """O8: `up --fresh` names the directory whose data it would delete; without a terminal it is
    refused."""
    kept = tmp_path / "data" / "objects" / "one"
    kept.parent.mkdir(parents=True)
    kept.write_text("an object")
    (tmp_path / "data" / "lock").write_text("1")
    outcome = CliRunner().invoke(cli, ["up", "--fresh", "--data-dir", str(tmp_path / "data")])
    assert outcome.exit_code == 2
    assert f"all tasks, records and objects in {tmp_path / 'data'} would be deleted" in outcome.stderr
    assert kept.exists()


@pytest.mark.parametrize("words", [["--level", "ERROR"], ["--step", "0"], ["--since", "1m"], ["--json"]])
def test_options_of_task_logs_need_a_task(words: list[str]) -> None:
    """O8: an option without an effect is refused."""
    result = CliRunner().invoke(cli, ["logs", *words])
    assert result.exit_code != 0
    assert f"{words[0]}: only with the ID of a task" in result.output
