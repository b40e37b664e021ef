"""No command shows a traceback, with any stream, directory, locale, input or answer."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from codecs import BOM_UTF8, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import click
import pytest
from click.testing import CliRunner
from tests.support.cli_verbs import value, verbs

from penstock.cli.inputs import Lines, callbacks_of, context_of
from penstock.cli.main import cli
from penstock.cli.output import moment
from penstock.client.arguments import encode_moment
from penstock.errors import InvalidRecord
from penstock.worker import Worker

REFUSED = {
    "--gateway": "http://127.0.0.1:1",
    "--postgres": "postgresql://127.0.0.1:1/x",
    "--kafka": "127.0.0.1:1",
}
LAST = "9999-12-31T23:59:59.999999Z"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory without a deployment, and an environment without addresses."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") and not name.startswith("PENSTOCK_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("penstock.cli.gateway.PATIENCE_S", 0.0)


def commands(servers: dict[str, str]) -> Iterator[list[str]]:
    """Each command with its required arguments and its servers, and each help text."""
    for path, verb in verbs(cli):
        arguments = [*path]
        for each in verb.params:
            if isinstance(each, click.Argument):
                arguments += [value(each)] if each.required else []
            elif each.opts[0] in servers:
                arguments += [each.opts[0], servers[each.opts[0]]]
            elif each.required:
                arguments += [each.opts[0], value(each)]
        yield arguments
        yield [*path, "--help"]
    for name in ("up", "run", "worker", "completion"):
        yield [name, "--help"]
    yield ["worker", "no_such_module"]


def call(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], stdout: IO[str] | None = None
) -> tuple[int, str]:
    """Runs a command with an output and a closed input; returns its status and its errors."""
    errors = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", io.TextIOWrapper(errors, "ascii", write_through=True))
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments, prog_name="penstock")
        sys.stdin.close()
        sys.stdout.close()
        printed = errors.getvalue().decode()
    status = ended.value.code
    assert isinstance(status, int), arguments
    assert 0 <= status <= 7, (arguments, printed)
    assert "Traceback" not in printed, (arguments, printed)
    return status, printed


class Ended(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def make_full() -> IO[str]:
    return Path("/dev/full").open("w")


OUTPUTS: dict[str, tuple[Callable[[], IO[str] | None], int, str]] = {
    # The status and the error of a help text.
    "closed": (lambda: None, 0, ""),
    "full": (make_full, 1, "penstock: No space left on device\n"),
    "ended": (Ended, 1, ""),
    "ascii": (lambda: io.TextIOWrapper(io.BytesIO(), "ascii"), 0, ""),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_command_has_a_status_with_any_output(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """O8: standard output is closed, full, a pipe to `head`, or is ASCII."""
    make, status, error = OUTPUTS[name]
    for arguments in commands(REFUSED):
        found = call(monkeypatch, arguments, make())
        assert "internal error" not in found[1], (arguments, found)
        if arguments[-1] == "--help":
            assert found == (status, error), arguments


def test_each_command_has_a_status_in_a_deleted_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """O8: the errors name the directory, and a gateway that is named is asked as ever."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in (*commands({}), ["up"], ["up", "--detach"]):
        _status, printed = call(monkeypatch, arguments)
        assert "internal error" not in printed, (arguments, printed)
    deleted = (6, "penstock: the working directory was deleted: change to another directory\n")
    assert call(monkeypatch, ["up"]) == call(monkeypatch, ["worker", "a"]) == deleted
    assert call(monkeypatch, ["list", "--gateway", REFUSED["--gateway"]])[0] == 5


class Nonsense(BaseHTTPRequestHandler):
    """A gateway whose answers lack every field."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 (names of the base class)

    def log_message(self, *_arguments: Any) -> None:
        pass


def test_an_error_that_no_command_expects_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: it names the place in Penstock and the way to its traceback, as text or as JSON."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            gateway = {"--gateway": f"http://127.0.0.1:{server.server_port}"}
            for arguments in commands(gateway):
                call(monkeypatch, arguments)
            status, printed = call(monkeypatch, ["types", "--gateway", gateway["--gateway"]])
            found = json.loads(call(monkeypatch, ["types", "--json", "--gateway", gateway["--gateway"]])[1])
        finally:
            server.shutdown()
            thread.join()
    assert (status, found["exit_status"]) == (1, 1)
    for text in (printed, found["error"]):
        assert "internal error (penstock/client/types.py:" in text
        assert "KeyError: 'types'" in text
    assert "python -X dev -m penstock" in printed
    assert "python -X dev -m penstock" in found["next"][0]


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the local time zone."""

    def choose(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield choose
    monkeypatch.undo()
    time.tzset()


def test_moments_have_a_zone_in_every_year(zone: Callable[[str], None]) -> None:
    """O8: the local calendar has no year 10000, and PostgreSQL has years that Python lacks."""
    zone("Asia/Tokyo")
    assert moment("2026-11-25T06:00:00Z") == "2026-11-25 15:00:00 +09:00"
    assert moment("2026-11-25T06:00:00") == "2026-11-25 15:00:00 +09:00"
    assert moment(LAST) == "9999-12-31 23:59:59 +00:00"
    zone("America/New_York")
    assert moment("0001-01-01T00:00:00Z") == "0001-01-01 00:00:00 +00:00"
    assert moment("-0001-01-01T00:00:00Z") == "-0001-01-01T00:00:00Z"
    assert moment("") == moment(None) == ""


@pytest.mark.parametrize("year", [1, 9999])
def test_the_client_names_a_moment_that_utc_lacks(zone: Callable[[str], None], year: int) -> None:
    """T3: local time at either end of the calendar."""
    zone("Asia/Tokyo" if year == 1 else "America/New_York")
    edge = datetime(1, 1, 1) if year == 1 else datetime(9999, 12, 31, 23, 59)  # noqa: DTZ001 (local time)
    with pytest.raises(InvalidRecord, match="/run_at: expected a datetime in the years 1 to 9999 of UTC"):
        encode_moment(edge, "run_at")
    assert encode_moment(edge.replace(tzinfo=UTC), "run_at")


TASK = '{"type": "é"}'


@pytest.mark.parametrize("stdin", [False, True])
def test_a_file_and_standard_input_are_read_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdin: bool
) -> None:
    """T5: lines end by LF, CRLF or CR, and a mark of UTF-8 may come first; UTF-16 is named."""

    def lines(content: bytes) -> Lines:
        (tmp_path / "tasks").write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return Lines("-" if stdin else "tasks", {})

    for end in ("\n", "\r\n", "\r"):
        content = f"{TASK}{end}{end}{TASK}{end}".encode()
        assert [*lines(BOM_UTF8 + content)] == [*lines(content)] == [{"type": "é"}] * 2
    with pytest.raises(InvalidRecord, match="line 1: not JSON: the text is UTF-16: save it as UTF-8"):
        [*lines(BOM_UTF16_LE + TASK.encode("utf-16-le"))]


def test_contexts_and_callbacks_may_begin_with_a_mark(tmp_path: Path) -> None:
    """T1, C1: editors write the mark of UTF-8; UTF-16 is named, and not sent as a URL."""
    (tmp_path / "utf8").write_bytes(BOM_UTF8 + b'{"url": "https://a.example/"}\r\n')
    (tmp_path / "utf16").write_bytes(BOM_UTF16_LE + "https://a.example/".encode("utf-16-le"))
    assert context_of("@utf8", "json") == {"url": "https://a.example/"}
    assert context_of("@utf8", "text").startswith("{")
    assert callbacks_of(["@utf8"]) == [{"url": "https://a.example/"}]
    for read in (lambda: callbacks_of(["@utf16"]), lambda: context_of("@utf16", "json")):
        with pytest.raises(InvalidRecord, match=r"save (it|the file) as UTF-8"):
            read()


def test_a_secret_of_another_encoding_is_not_quoted(tmp_path: Path) -> None:
    """C7: `--secret-file` in UTF-16."""
    (tmp_path / "secret").write_text("whsec_abc", encoding="utf-16")
    outcome = CliRunner().invoke(
        cli, ["targets", "secrets", "create", "--secret-file", "secret", "--gateway", REFUSED["--gateway"]]
    )
    assert (outcome.exit_code, "--secret-file is not UTF-8" in outcome.stderr) == (3, True)
    assert "abc" not in outcome.stderr


def test_a_worker_off_the_main_thread_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W1: only the main thread receives signals."""
    monkeypatch.setattr("penstock.logs.configure_for_errors", lambda _name: None)
    statuses: list[object] = []

    def run() -> None:
        with pytest.raises(SystemExit) as ended:
            Worker(kafka="127.0.0.1:1", objects="file:///nowhere").run()
        statuses.append(ended.value.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert statuses == [6]
    [record] = caplog.records
    assert "run() handles signals, which only the main thread receives" in str(vars(record)["error"])


async def test_a_worker_in_an_event_loop_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W1: a notebook runs an event loop on its main thread."""
    monkeypatch.setattr("penstock.logs.configure_for_errors", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        Worker(kafka="127.0.0.1:1", objects="file:///nowhere").run()
    assert ended.value.code == 6
    [record] = caplog.records
    assert "run() starts an event loop, and one runs" in str(vars(record)["error"])
