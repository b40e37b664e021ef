"""Handlers and programs that fork: a child disturbs neither the worker nor a client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from penstock.tracing import spans

LOOPS = pytest.mark.parametrize("loop", ["uvloop", "plain"])


def probe(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forking_probe", *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@LOOPS
def test_a_signal_for_a_child_does_not_reach_its_parent(loop: str) -> None:
    """W1: a child that a handler forks has default signals, also if the signal comes at once. Its
    SIGTERM ends it, and the worker does not drain."""
    assert probe("signals", loop) == {
        "statuses": ["-15"],
        "handlers": ["default", "python", "default", "-1"],
        "on_thread": ["default", "python", "default", "-1"],
        "drains": False,
    }


@LOOPS
def test_a_child_has_no_connections_of_its_parent(loop: str) -> None:
    """W1: a child has neither the port nor the connections, which the parent goes on to use."""
    here = ["here", 3]
    assert probe("connections", loop) == {"before": here, "child": 0, "after": here}


def test_a_child_ends_with_its_handler() -> None:
    """W1: it does not become a second worker with the same attempts. Its status is that of
    `sys.exit`, and its parent's middleware does not see it."""
    assert probe("outcomes") == {"statuses": [0, 3] * 4, "results": ["done"] * 8, "process": True}


def test_a_child_keeps_no_lock(tmp_path: Path) -> None:
    """W1, O1: a child that outlives a deployment keeps neither its reaper nor its directory. A line
    that it logs waits for no thread of the parent."""
    assert probe("locks", str(tmp_path)) == {"logged": 0, "reaped": True}


class Gateway(BaseHTTPRequestHandler):
    """Answers with one type, or a page with one task."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"types": [TYPE]} if self.path.startswith("/types") else PAGE).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""


TYPE: dict[str, Any] = {"name": "t"}
TASK = {
    "type": "t",
    "state": "ready",
    "stage": "s",
    "attempt": 0,
    "priority": "MEDIUM",
    "labels": {},
    "error": None,
}
PAGE: dict[str, Any] = {"tasks": [{"id": 1, **TASK}, {"id": 2, **TASK}], "next": None}


@pytest.fixture
def gateway() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_client_works_in_a_forked_child(gateway: str) -> None:
    """T5: a `SyncClient` that the parent of a prefork server has opened connects anew in a child,
    where it waited without end. What cannot go on there raises an error that says so."""
    begun = "the iteration began in another process: begin it again in this process"
    opened = "the client was opened in another process: open one in this process, after the fork"
    assert probe("client", gateway) == {
        "child": [[1] * 4, begun, 1],
        "after": [1, 2],
        "left": "left",
        "async": [1, opened, 1],
    }


def test_a_child_exports_spans_on_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """O4: spans of a child do not come between those of its parent on one connection."""
    connected: list[Exporter] = []

    class Exporter(spans.SpanExporter):
        def __init__(self) -> None:
            connected.append(self)
            self.batches = 0

        def export(self, _spans: Any) -> SpanExportResult:
            self.batches += 1
            return SpanExportResult.SUCCESS

    exporter = spans.ProcessExporter(Exporter)
    exporter.export([])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    exporter.export([])
    exporter.export([])
    assert [each.batches for each in connected] == [1, 2]
