"""The event loop of a process: uvloop's if it is installed, with name lookups that can be left.

Both uvloop and asyncio resolve names in a small pool of threads. A resolver that does not answer
keeps each thread for ten seconds and more. Lookups wait for each other then, also those of
numeric addresses, and a loop cannot be closed before the last one has ended. So each lookup has a
thread of its own here, which no caller waits for after its own time limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# An entry of `getaddrinfo`.
Address = tuple[Any, ...]
# The arguments of `getaddrinfo`.
Query = tuple[Any, ...]

# The most lookups at once; further ones take the loop's own way. A service has a handful of names,
# while the handlers of a worker may have any number.
MAX_LOOKUPS = 64


class Lookups:
    """Name lookups in threads of their own. Lookups of one name at the same time share a thread.

    Args:
        look_up: `socket.getaddrinfo`.
    """

    def __init__(self, look_up: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._pending: dict[Query, Future[list[Address]]] = {}

    def start(self, query: Query) -> Future[list[Address]] | None:
        """The result of a lookup, which cannot be cancelled; None when too many are under way."""
        with self._lock:
            if (pending := self._pending.get(query)) is not None:
                return pending
            if len(self._pending) >= MAX_LOOKUPS:
                return None
            found = self._pending[query] = Future[list[Address]]()
        # From now on, a waiter that is cancelled does not cancel the others.
        found.set_running_or_notify_cancel()
        # The end of the process does not wait for a daemon.
        thread = threading.Thread(target=self._run, args=(query, found), name="lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The process has too many threads. Later lookups of this name must not wait for it.
            with self._lock:
                del self._pending[query]
            found.set_exception(OSError(f"no thread for a lookup of {query[0]}: {error}"))
        return found

    def _run(self, query: Query, found: Future[list[Address]]) -> None:
        addresses: list[Address] = []
        error: BaseException | None = None
        try:
            addresses = self._look_up(*query)
        except BaseException as raised:  # noqa: BLE001 (fails closed: each waiter raises it; without it they would wait without an end)
            error = raised
        with self._lock:
            # Before the result: a caller that retries begins a new lookup.
            del self._pending[query]
        if error is not None:
            found.set_exception(error)
        else:
            found.set_result(addresses)


# All loops of the process share them: Kafka's consumer has a loop of its own.
_lookups = Lookups()


def _is_numeric(host: object) -> bool:
    try:
        ipaddress.ip_address(str(host))
    except ValueError:
        return False
    return True


class _OwnLookups:
    """The methods of an event loop that resolve names."""

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 (asyncio's name)
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """Like asyncio's; a lookup that is under way is shared."""
        found = _lookups.start((host, port, family, type, proto, flags))
        if found is None:
            return await super().getaddrinfo(  # type: ignore[misc,no-any-return]  # of the event loop
                host, port, family=family, type=type, proto=proto, flags=flags
            )
        return await asyncio.wrap_future(found)

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        """Like asyncio's: connects to the first address of the name that accepts it."""
        connect = super().create_connection  # type: ignore[misc]  # of the event loop
        if host is None or _is_numeric(host):
            return await connect(protocol_factory, host, port, **options)  # type: ignore[no-any-return]  # see above
        family, flags = options.pop("family", 0), options.pop("flags", 0)
        addresses = await self.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, proto=options.get("proto", 0), flags=flags
        )
        if options.get("ssl") and options.get("server_hostname") is None:
            options["server_hostname"] = host
        errors: list[OSError] = []
        for _family, _type, _protocol, _name, address in addresses:
            try:
                return await connect(protocol_factory, address[0], address[1], **options)  # type: ignore[no-any-return]  # see above
            except OSError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise OSError("; ".join(str(error) for error in errors) or f"{host} has no address")


class _PlainLoop(_OwnLookups, asyncio.SelectorEventLoop):
    pass


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns the factory of uvloop's event loop if uvloop is installed, else of asyncio's."""
    try:
        import uvloop  # noqa: PLC0415 (optional dependency)
    except ImportError:
        return _PlainLoop

    # Its types are not those of asyncio's loop.
    base: Any = uvloop.Loop

    class Loop(_OwnLookups, base):  # type: ignore[misc]  # see above
        pass

    return Loop
