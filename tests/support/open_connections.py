"""Fails the test that leaves a connection open.

Without this plugin the interpreter reports the connection when it collects it: in a later test, and
without its origin.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from asyncio import selector_events, sslproto
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.unraisableexception import collect_unraisable

# Frames in files of these folders lead to the code of interest and do not show it.
_RUNNER = ("/asyncio/", "/_pytest/", "/pluggy/", "/pytest_asyncio/", "/xdist/", "/execnet/")
# Tests in these folders open connections; unit and contract tests are many and quick.
_COLLECTED = ("integration", "acceptance", "chaos", "load")


class OpenConnections:
    """The plugin: it records where each connection of asyncio was made."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._leaked: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Records the connections that are made from now on."""
        original = selector_events._SelectorTransport.__init__  # type: ignore[attr-defined]

        def record(transport: Any, loop: Any, sock: Any, protocol: Any, *more: Any, **named: Any) -> None:
            original(transport, loop, sock, protocol, *more, **named)
            self._made[transport] = _origin(sock, protocol)

        selector_events._SelectorTransport.__init__ = record  # type: ignore[attr-defined]
        config.add_cleanup(
            lambda: setattr(selector_events._SelectorTransport, "__init__", original)  # type: ignore[attr-defined]
        )
        loops = selector_events.BaseSelectorEventLoop
        close = loops.close

        def close_with_connections(loop: Any) -> None:
            close(loop)
            # At once: a test may run several loops, and the interpreter may collect at any time.
            self._close_connections()

        loops.close = close_with_connections  # type: ignore[method-assign]
        config.add_cleanup(lambda: setattr(loops, "close", close))

    def pytest_collection_finish(self) -> None:
        """Excludes what the tests import from each later collection: a collection then takes
        milliseconds."""
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Fails the test, after its fixtures, for connections of a loop that is closed."""
        result = yield
        leaked = self.take_leaked()
        if item.path.relative_to(item.config.rootpath).parts[1] in _COLLECTED:
            gc.collect()
            collect_unraisable(item.config)
            if nextitem is None or nextitem.path != item.path:
                # Caches outlive a module. With those of a hundred tests, a collection would take a
                # fifth of a second. The fixtures of the module have ended.
                gc.freeze()
        if leaked:
            pytest.fail(
                "the event loop has ended, and these connections are open:\n" + "\n".join(leaked),
                pytrace=False,
            )
        return result

    def take_leaked(self) -> list[str]:
        """The origins of connections that their owner left open, of loops that are closed; each
        once."""
        self._close_connections()
        leaked, self._leaked = self._leaked, []
        return leaked

    def _close_connections(self) -> None:
        # A copy: another thread may open a connection meanwhile.
        for transport in [found for reference in self._made.keyrefs() if (found := reference()) is not None]:
            sock, loop = transport._sock, transport._loop
            if sock is None or (loop is not None and not loop.is_closed()):
                continue
            if not transport._closing and not _awaits_peer(transport):
                self._leaked.append(self._made[transport])
            # Otherwise the interpreter reports it again when it collects it.
            sock.close()
            transport._sock, transport._closing = None, True


def _awaits_peer(transport: Any) -> bool:
    """Whether its owner has closed a TLS connection whose peer has not confirmed that yet.

    asyncio keeps the socket open for that, up to 30 s, and `asyncio.run` does not wait for it.
    aiokafka does not wait either for connections that it needs only once.
    """
    protocol = transport._protocol
    return isinstance(protocol, sslproto.SSLProtocol) and (
        protocol._app_transport is None or protocol._app_transport._closed
    )


def _origin(sock: Any, protocol: object) -> str:
    frames = [
        f"    {frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_stack(sys._getframe(2), limit=25)
        if not any(part in frame.filename for part in _RUNNER)
    ]
    return "\n".join([f"{type(protocol).__name__} at {sock.getsockname()}, made in", *frames])
