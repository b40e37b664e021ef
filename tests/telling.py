"""What is told at the end of a run beside the tests' outcomes, whether one process ran them or several (pytest-xdist)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# What a worker process sends with its end, in xdist's own dictionary.
_KEY = "penstock-told"

_TELLERS: list[tuple[str, Callable[[], str]]] = []
_HEARD: list[tuple[str, str]] = []


def tell_at_the_end(heading: str, text: Callable[[], str]) -> None:
    """Has `text` asked for when all tests of this process have run; nothing is told when it is empty."""
    _TELLERS.append((heading, text))


def _told() -> list[tuple[str, str]]:
    return [(heading, found) for heading, text in _TELLERS if (found := text())]


class Telling:
    """The plugin: a worker hands its texts to the process that started it, and that one writes them."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = _told()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """In the process that started the workers: one of them has ended, or was lost and has no output."""
        _HEARD.extend(getattr(node, "workeroutput", {}).get(_KEY, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Where there is a terminal."""
        for heading, text in [*_told(), *_HEARD]:
            terminalreporter.write_sep("=", heading)
            terminalreporter.write(text)
