"""Log entries: one a line, with event and fields, without secrets."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import logs
from penstock.core.completion import Fence
from penstock.errors import SettingsError


def record_of(message: str, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("penstock.test").makeRecord(
        "penstock.test", logging.WARNING, __file__, 1, message, (), None, extra=extra
    )


def text_of(message: str, **extra: Any) -> str:
    return logs.TextFormatter("%(message)s").format(record_of(message, **extra))


def entry(message: str, **extra: Any) -> Any:
    """The JSON object of one entry, which is exactly one line."""
    line = logs.JsonFormatter("stages").format(record_of(message, **extra))
    assert "\n" not in line
    return json.loads(line)


def test_an_entry_has_time_level_service_message_and_fields() -> None:
    """O4: each value that a search needs is a member of its own."""
    found = entry(
        "A lease\nexpired",
        event="lease_expired",
        **Fence(7, 1, "cut", 2).ids(),
        task_type="media",
        target=None,
    )
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "service": "stages",
        "logger": "penstock.test",
        "message": "A lease\nexpired",
        "event": "lease_expired",
        "task": 7,
        "step": 1,
        "stage": "cut",
        "attempt": 2,
        "task_type": "media",
    }


def test_text_appends_the_event_and_the_fields() -> None:
    """O4: a person sees the values that vary behind the fixed sentence."""
    line = text_of(
        "A lease expired", task=7, event="lease_expired", task_type="media cut", target=None, why='a "b"\n'
    )
    assert line == r'''A lease expired event=lease_expired task=7 task_type="media cut" why="a \"b\"\n"'''


def test_text_appends_the_fields_before_the_traceback() -> None:
    """A traceback's last line stays the exception's."""
    record = record_of("A call failed", event="call_failed")
    record.exc_info = (ValueError, ValueError("x"), None)
    assert (
        logs.TextFormatter("%(message)s").format(record) == "A call failed event=call_failed\nValueError: x"
    )


@pytest.mark.parametrize(("error", "shown"), [(ValueError("no"), "no"), (ValueError(), "ValueError()")])
def test_an_exception_as_a_field_is_its_text(error: ValueError, shown: str) -> None:
    """An exception without a text is shown by its type."""
    assert entry("x", error=error)["error"] == shown
    assert text_of("x", error=error) == f"x error={shown}"


def test_a_secret_in_an_exception_is_cut_out() -> None:
    """An HTTP library puts the URL into its exceptions."""
    error = ValueError("GET https://a.example/?key=secret")
    assert entry("x", error=error)["error"] == "GET https://a.example/?…"
    assert text_of("x", error=error) == 'x error="GET https://a.example/?…"'


def test_ids_do_not_replace_what_every_entry_has() -> None:
    """A handler's own `extra` cannot pretend to be another service."""
    assert entry("x", service="other", level="info")["service"] == "stages"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("POST https://a.example/hook?key=secret failed", "POST https://a.example/hook?… failed"),
        ("at 'http://a/b?c=d&e=f#x'", "at 'http://a/b?…#x'"),
        ("postgresql://me:pass@db:5432/x?sslmode=require", "postgresql://…@db:5432/x?…"),
        ("https://user:pa?ss@a/ok", "https://user:pa?…"),
        ("why? because http://a/b is away", "why? because http://a/b is away"),
        ("nothing at all?yes", "nothing at all?yes"),
    ],
)
def test_urls_keep_their_secrets(text: str, expected: str) -> None:
    """Keys in queries and passwords before hosts are in no log, in whichever format and member
    they come."""
    assert logs.redacted(text) == expected
    found = entry(text, target=text)
    assert found["message"] == found["target"] == expected
    record = logging.makeLogRecord({"msg": text})
    assert expected in logs.TextFormatter(logs.TEXT).format(record)


def test_a_traceback_of_a_handler_stands_below_its_entry() -> None:
    """O4: text shows it as Python does, without its query strings; JSON has it as a member."""
    traceback = 'Traceback (most recent call last):\n  File "shop.py"\nKeyError: "http://a/?k=secret"\n'
    text = text_of("An attempt failed", event="attempt_failed", traceback=traceback)
    assert text.splitlines()[0] == "An attempt failed event=attempt_failed"
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert "secret" not in text
    found = entry("An attempt failed", event="attempt_failed", traceback=traceback)
    assert found["traceback"].startswith("Traceback")
    assert "secret" not in found["traceback"]
    assert text_of("It failed", traceback=None) == "It failed"


def test_a_traceback_is_in_its_entry() -> None:
    """One line, secrets cut out of it as well."""
    try:
        int("https://a/b?key=secret")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, "it failed", (), sys.exc_info()
        )
    line = logs.JsonFormatter("stages").format(record)
    assert "secret" not in line
    assert "Traceback" in json.loads(line)["error"]
    assert "\n" not in line


@given(
    st.dictionaries(
        st.sampled_from(["task", "target", "why"]),
        st.one_of(
            st.text(), st.integers(), st.floats(), st.binary(), st.lists(st.text()), st.sets(st.integers())
        ),
    ),
    st.text(),
)
def test_whatever_is_logged_is_one_line_of_json(extra: dict[str, Any], message: str) -> None:
    """Lone surrogates, integers beyond 64 bits, bytes: an entry is never lost and never two."""
    assert "message" in entry(message, **extra)
    assert "\n" not in text_of("x", **extra)


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt format must not silently be text."""
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "jsonl")
    with pytest.raises(SettingsError, match="PENSTOCK_LOG_FORMAT='jsonl' must be one of: text, json"):
        logs.configure("stages")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_process_logs_in_the_format_that_is_asked_for(form: str) -> None:
    """O4: each line of a process's standard error is one object, or one sentence with its
    fields."""
    code = (
        "import logging\n"
        "from penstock import process\n"
        "async def service(stopping, ready):\n"
        "    ready(); logging.getLogger('x').info('done %d', 3, extra={'task': 3})\n"
        "raise SystemExit(process.run('stages', service))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PENSTOCK_LOG_FORMAT": form},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert [one["message"] for one in found] == ["The process is ready", "done 3", "The process stopped"]
        assert found[1]["task"] == 3
        assert {one["service"] for one in found} == {"stages"}
    else:
        assert lines[1].endswith("INFO    x done 3 task=3")
