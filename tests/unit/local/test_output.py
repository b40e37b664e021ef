"""The merged log."""

from __future__ import annotations

import io

from penstock.local.output import FileLog, MergedLog, both, wants_colour


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_begin_with_the_name_of_their_program():
    """Without colour the output is name and line only."""
    stream = io.StringIO()
    MergedLog(stream, colour=False)("stages", "ready")
    assert stream.getvalue() == "stages       ready\n"


def test_each_program_has_a_colour_of_its_own():
    """The second program's colour differs from the first's, and a program keeps its own."""
    stream = io.StringIO()
    log = MergedLog(stream, colour=True)
    for name in ("stages", "gateway", "stages"):
        log(name, "x")
    first, second, third = (line.partition("m")[0] for line in stream.getvalue().splitlines())
    assert first == third != second


def test_no_color_is_respected(monkeypatch):
    """NO_COLOR set to anything, and a pipe, mean plain text; a terminal alone means colour."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_routine_lines_go_to_the_file_only(tmp_path):
    """PostgreSQL's lines of level LOG are in the file only; errors are also on the terminal."""
    stream = io.StringIO()
    file = FileLog(tmp_path / "log" / "penstock.log")
    log = both(file, MergedLog(stream, colour=False))
    log("postgres", "LOG:  database system is ready")
    log("postgres", "ERROR:  deadlock detected")
    file.close()
    assert stream.getvalue() == "postgres     ERROR:  deadlock detected\n"
    assert (tmp_path / "log" / "penstock.log").read_text().count("\n") == 2


def test_the_end_of_an_output_is_told_once():
    """`penstock up | head` stops the deployment: later lines are dropped, and no thread fails."""

    class Pipe(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    told = []
    log = MergedLog(Pipe(), colour=False, on_lost=lambda: told.append(1))
    assert not log.lost
    for _ in range(3):
        log("stages", "ready")
    assert (log.lost, told) == (True, [1])


def test_a_log_file_has_every_character_in_any_locale(tmp_path):
    """A line of a service may have any character, and the locale of `up` may be ASCII."""
    file = FileLog(tmp_path / "penstock.log")
    file("stages", "é \udcff")
    file.close()
    assert (tmp_path / "penstock.log").read_bytes() == "stages       é \\udcff\n".encode()


def test_the_previous_log_is_kept(tmp_path):
    """A new run starts a new file and keeps the one before it."""
    for text in ("one", "two"):
        file = FileLog(tmp_path / "penstock.log")
        file("stages", text)
        file.close()
    assert (tmp_path / "penstock.log").read_text() == "stages       two\n"
    assert (tmp_path / "penstock.log.1").read_text() == "stages       one\n"
