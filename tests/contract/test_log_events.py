"""Every log call of Penstock has a fixed sentence and a stable event key;
docs/reference/log-events.md lists them.

PENSTOCK_WRITE_DOCS=1 pytest tests/contract/test_log_events.py    regenerates the page.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock import logs
from penstock.kafka.topology.services import SERVICES

PACKAGE = Path(penstock.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "log-events.md"
# Packages of one program; all other modules are shared.
PROGRAMS = {
    **{service.package: name for name, service in SERVICES.items()},
    "http": "gateway",
    "worker": "worker",
    "checks": "`penstock check`",
}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# Members that each JSON entry sets itself.
RESERVED = logs.STANDARD | {"time", "level", "service", "logger", "trace_id"}
EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


class Call(NamedTuple):
    """One log call: its place, level, event, sentence, fields and faults. Missing parts are
    empty."""

    module: str
    line: int
    level: str
    event: str
    message: str
    fields: tuple[str, ...]
    faults: tuple[str, ...]


@pytest.fixture(scope="module")
def calls() -> tuple[Call, ...]:
    """The log calls of the package; not at import, because each process of a run imports this."""
    return tuple(found())


def found() -> Iterator[Call]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module, code = str(path.relative_to(PACKAGE)), path.read_text()
        if not re.search(r"\blog(ger)?\.", code):
            continue
        for node in ast.walk(ast.parse(code)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"log", "logger"}
                and node.func.attr in LEVELS
            ):
                yield checked(module, node.lineno, node.func.attr, node)


def checked(module: str, line: int, level: str, call: ast.Call) -> Call:
    """The call, with the rules it breaks."""
    faults = []
    message = text(call.args[0]) if call.args else ""
    if not message or "%" in message or len(call.args) > 1:
        faults.append("its message must be one constant sentence without placeholders")
    extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
    members = (
        {text(key): value for key, value in zip(extra.keys, extra.values, strict=True) if key is not None}
        if isinstance(extra, ast.Dict)
        else {}
    )
    event = text(members["event"]) if "event" in members else ""
    if not EVENT.fullmatch(event):
        faults.append('its extra must be a dict with a constant snake_case "event" of two words or more')
    if taken := sorted(RESERVED & members.keys()):
        faults.append(f"every entry has these names already: {taken}")
    traced = level == "exception" or any(keyword.arg == "exc_info" for keyword in call.keywords)
    if traced and "error" in members:
        faults.append("the traceback takes the place of its field error")
    fields = tuple(sorted(members.keys() - {"event"}))
    return Call(module, line, level, event, message, fields, tuple(faults))


def document(calls: tuple[Call, ...]) -> str:
    by_event: dict[str, list[Call]] = {}
    for call in calls:
        if not call.faults:
            by_event.setdefault(call.event, []).append(call)
    rows = []
    for event, same in sorted(by_event.items()):
        programs = sorted({PROGRAMS.get(call.module.partition("/")[0], "several") for call in same})
        levels = sorted({"error" if call.level == "exception" else call.level for call in same})
        fields = sorted({f"`{field}`" for call in same for field in call.fields})
        cells = (f"`{event}`", ", ".join(levels), ", ".join(programs), same[0].message, ", ".join(fields))
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    return f"""# Log events

Generated from the code by `tests/contract/test_log_events.py`, which fails when this page is out of date.

Every log entry of Penstock has a stable `event`, a fixed sentence, and fields with the values that vary. Alerts and searches
should use `event`. An entry about one attempt, record or task also has its ids. Entries of libraries have no `event`.

| event | level | service | sentence | fields |
| --- | --- | --- | --- | --- |
{table}
"""


def text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_log_calls_have_a_sentence_and_an_event(calls: tuple[Call, ...]) -> None:
    """An alert or a search can rely on `event`; the sentence never varies."""
    assert [f"{call.module}:{call.line}: {fault}" for call in calls for fault in call.faults] == []
    assert len(calls) > 100


def test_the_page_lists_every_event(calls: tuple[Call, ...]) -> None:
    """O4: an operator finds every event with its level, service and meaning."""
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        PAGE.write_text(document(calls))
    assert PAGE.read_text() == document(calls)


def test_an_event_has_one_sentence(calls: tuple[Call, ...]) -> None:
    """Two sentences under one key would be two events."""
    sentences: dict[str, set[str]] = {}
    for call in calls:
        if not call.faults:
            sentences.setdefault(call.event, set()).add(call.message)
    assert {event: found for event, found in sentences.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('log.info("Done %d", 3, extra={"event": "work_done"})', "constant sentence"),
        ('log.info(f"Done {x}", extra={"event": "work_done"})', "constant sentence"),
        ('log.info("Done")', '"event"'),
        ('log.info("Done", extra={"event": "Done"})', '"event"'),
        ('log.info("Done", extra={"event": kind})', '"event"'),
        ('log.info("Done", extra={"event": "work_done", "name": 1})', "already"),
        ('log.exception("Done", extra={"event": "work_done", "error": e})', "traceback"),
    ],
)
def test_the_rules_find_faults(code: str, fault: str) -> None:
    """Each rule rejects what it is there for."""
    call = ast.parse(code).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert isinstance(call.value.func, ast.Attribute)
    assert [fault in found for found in checked("m.py", 1, call.value.func.attr, call.value).faults] == [True]
