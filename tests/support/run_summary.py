"""Sections that tests add to the end of a run's output, in one process or in several
(pytest-xdist)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# The key of a worker process's sections in xdist's `workeroutput`.
_OUTPUT_KEY = "penstock-summary"

_SECTIONS: list[tuple[str, Callable[[], str]]] = []
_RECEIVED: list[tuple[str, str]] = []


def add_summary(heading: str, text: Callable[[], str]) -> None:
    """Adds a section; `text` is called after the last test of this process, and an empty text is
    left out."""
    _SECTIONS.append((heading, text))


def _texts() -> list[tuple[str, str]]:
    return [(heading, found) for heading, text in _SECTIONS if (found := text())]


class RunSummary:
    """The plugin: worker processes send their sections to the controller, which prints them."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sends this worker's sections."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT_KEY] = _texts()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Receives a worker's sections; a worker that crashed has no output."""
        _RECEIVED.extend(getattr(node, "workeroutput", {}).get(_OUTPUT_KEY, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints all sections."""
        for heading, text in [*_texts(), *_RECEIVED]:
            terminalreporter.write_sep("=", heading)
            terminalreporter.write(text)
