"""The synchronous client: its methods run those of `Client` on their own event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from penstock.client.asynchronous import Client

P = ParamSpec("P")
T = TypeVar("T")


# Threads of a forked child may use the client first at the same time.
_opening = threading.Lock()


def _renew_lock() -> None:
    # A thread of the parent may hold it.
    global _opening  # noqa: PLW0603 (of the process)
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # Raised by the caller's `progress` function or iterator of drafts. It has ended
            # `run_forever`, and further calls would wait without end, so the loop runs again. The
            # caller gets the exception from its own call.
            continue
        return


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    """A method that waits for a coroutine of `Client`, with its parameters and docstring."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    """A method that iterates over a method of `Client`, with its parameters and docstring."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._client, *args, **kwargs))

    signature = inspect.signature(method)
    returned = signature.return_annotation.replace("AsyncIterator", "Iterator")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]  # for `help`
    return call


class SyncClient:
    """A connection to a gateway for the time of a `with` block; threads may share it.

    Forked children may use it too, such as the processes of a web server: each opens a connection
    of its own. An iteration that began in the parent raises RuntimeError there.

    Arguments, methods and errors are those of `Client`. Functions passed as `progress` or `begun`
    run on another thread.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        patience_s: float = 10.0,
        timeout_s: float = 60.0,
        own_keys: bool = True,
        api_key: str | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self._client = Client(
            url,
            patience_s=patience_s,
            timeout_s=timeout_s,
            own_keys=own_keys,
            api_key=api_key,
            data_dir=data_dir,
        )
        self._client._read_result = self.result  # noqa: SLF001 (its tasks are used by blocking code)
        self._client._read_output = self.flow_output  # noqa: SLF001 (likewise)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        # The loops and sessions of parents, which would be closed when they are collected.
        self._inherited: list[object] = []

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self._client.url

    submit = _blocking(Client.submit)
    submit_many = _blocking(Client.submit_many)
    submit_and_wait = _blocking(Client.submit_and_wait)
    get = _blocking(Client.get)
    list = _iterating(Client.list)
    cancel = _blocking(Client.cancel)
    states = _blocking(Client.states)
    progress = _blocking(Client.progress)
    watch = _iterating(Client.watch)
    wait = _blocking(Client.wait)
    as_completed = _iterating(Client.as_completed)
    results = _blocking(Client.results)
    result = _blocking(Client.result)
    why = _blocking(Client.why)
    log_runs = _blocking(Client.log_runs)
    log_lines = _iterating(Client.log_lines)
    follow_log = _iterating(Client.follow_log)
    backlog = _iterating(Client.backlog)

    types = _blocking(Client.types)
    type_durations = _blocking(Client.type_durations)
    owners = _blocking(Client.owners)
    workers = _iterating(Client.workers)
    register_type = _blocking(Client.register_type)
    change_type = _blocking(Client.change_type)
    keys = _iterating(Client.keys)
    change_key = _blocking(Client.change_key)
    reset_key = _blocking(Client.reset_key)

    put_flow_definition = _blocking(Client.put_flow_definition)
    flow_definitions = _iterating(Client.flow_definitions)
    flow_versions = _iterating(Client.flow_versions)
    flow_definition = _blocking(Client.flow_definition)
    submit_flow = _blocking(Client.submit_flow)
    submit_flows = _blocking(Client.submit_flows)
    send_event = _blocking(Client.send_event)

    rerun = _blocking(Client.rerun)
    operate = _blocking(Client.operate)
    operations = _iterating(Client.operations)
    operation = _blocking(Client.operation)
    stop_operation = _blocking(Client.stop_operation)

    get_flow = _blocking(Client.get_flow)
    list_flows = _iterating(Client.list_flows)
    flow_node = _blocking(Client.flow_node)
    flow_children = _iterating(Client.flow_children)
    why_flow = _blocking(Client.why_flow)
    watch_flow = _iterating(Client.watch_flow)
    wait_for_flow = _blocking(Client.wait_for_flow)
    flow_output = _blocking(Client.flow_output)
    pause_flow = _blocking(Client.pause_flow)
    resume_flow = _blocking(Client.resume_flow)
    cancel_flow = _blocking(Client.cancel_flow)
    recover_flow = _blocking(Client.recover_flow)
    rerun_flow = _blocking(Client.rerun_flow)
    operate_flows = _blocking(Client.operate_flows)

    put_schedule = _blocking(Client.put_schedule)
    schedules = _iterating(Client.schedules)
    schedule = _blocking(Client.schedule)
    remove_schedule = _blocking(Client.remove_schedule)
    pause_schedule = _blocking(Client.pause_schedule)
    resume_schedule = _blocking(Client.resume_schedule)
    schedule_ticks = _blocking(Client.schedule_ticks)
    schedule_skips = _iterating(Client.schedule_skips)
    schedule_history = _iterating(Client.schedule_history)
    backfill = _blocking(Client.backfill)
    backfills = _iterating(Client.backfills)
    get_backfill = _blocking(Client.get_backfill)
    stop_backfill = _blocking(Client.stop_backfill)

    targets = _iterating(Client.targets)
    target = _blocking(Client.target)
    disable_target = _blocking(Client.disable_target)
    enable_target = _blocking(Client.enable_target)
    limit_target = _blocking(Client.limit_target)
    callbacks = _iterating(Client.callbacks)
    replay = _blocking(Client.replay)

    callback_secrets = _iterating(Client.callback_secrets)
    create_callback_secret = _blocking(Client.create_callback_secret)
    rotate_callback_secret = _blocking(Client.rotate_callback_secret)
    revoke_callback_secret = _blocking(Client.revoke_callback_secret)
    reencrypt_callback_secrets = _blocking(Client.reencrypt_callback_secrets)
    public_keys = _blocking(Client.public_keys)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        if self._process != os.getpid():
            # This child has not used it.
            return
        self._run(self._client.__aexit__())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def _open(self) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="penstock-client", daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(self._client.__aenter__(), loop).result()
        self._loop, self._thread = loop, thread
        self._process = os.getpid()

    def _open_in_child(self) -> None:
        with _opening:
            if self._process != os.getpid():
                assert self._loop is not None
                # At the end of the child it would log that the parent's connection is open.
                self._loop.set_exception_handler(lambda _loop, _context: None)
                self._inherited += [self._loop, self._client._session]  # noqa: SLF001 (see `__init__`)
                self._open()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the client is not open: use it in a `with` block")
        if self._process != os.getpid():
            # The thread of the parent's loop is not in this process: its answer would never come.
            self._open_in_child()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # Fails closed: raised again, and the request is cancelled. After Ctrl-C it would
            # otherwise continue on the loop's thread.
            future.cancel()
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def next_item() -> tuple[bool, T | None]:
            # A coroutine cannot raise StopAsyncIteration through a future.
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        process = os.getpid()
        while True:
            if process != os.getpid():
                raise RuntimeError("the iteration began in another process: begin it again in this process")
            found, item = self._run(next_item())
            if not found:
                return
            yield item  # type: ignore[misc]  # an item was found, so it is a T
