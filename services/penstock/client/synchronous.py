"""The same client for code without an event loop: it keeps one on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar

from penstock.client.asynchronous import Client
from penstock.client.models import Cancelled, Draft, Operated, Replayed, Submitted, Task, TaskFilter
from penstock.core.operations import Verb
from penstock.core.task import Priority

T = TypeVar("T")


class SyncClient:
    """Speaks with a gateway, for the time of a `with` block; may be shared by threads.

    Arguments, methods and errors are those of `Client`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        patience_s: float = 10.0,
        timeout_s: float = 60.0,
        own_keys: bool = True,
        api_key: str | None = None,
    ) -> None:
        self._client = Client(
            url, patience_s=patience_s, timeout_s=timeout_s, own_keys=own_keys, api_key=api_key
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self._client.url

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-client", daemon=True)
        self._thread.start()
        self._run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._run(self._client.__aexit__())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def submit(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        *,
        stage: str | None = None,
        priority: Priority | str = Priority.MEDIUM,
        key: str | None = None,
        idempotency_key: str | None = None,
        run_at: datetime | None = None,
        callbacks: Sequence[str | Mapping[str, Any]] | None = None,
        events: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Submitted:
        """See `Client.submit`."""
        return self._run(
            self._client.submit(
                type,
                context,
                stage=stage,
                priority=priority,
                key=key,
                idempotency_key=idempotency_key,
                run_at=run_at,
                callbacks=callbacks,
                events=events,
                labels=labels,
            )
        )

    def submit_many(
        self,
        drafts: Iterable[Draft | Mapping[str, Any]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Submitted]:
        """See `Client.submit_many`; `progress` is called from another thread."""
        return self._run(self._client.submit_many(drafts, progress=progress))

    def get(self, task_id: int) -> Task:
        """See `Client.get`."""
        return self._run(self._client.get(task_id))

    def list(
        self,
        *,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        state: str | Sequence[str] = (),
        stage: str | None = None,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Task]:
        """See `Client.list`."""
        return self._each(
            self._client.list(
                type=type,
                state=state,
                stage=stage,
                key=key,
                labels=labels,
                idempotency_key=idempotency_key,
                limit=limit,
            )
        )

    def cancel(self, ids: Iterable[int]) -> Cancelled:
        """See `Client.cancel`."""
        return self._run(self._client.cancel(ids))

    def states(self, ids: Iterable[int]) -> dict[str, int]:
        """See `Client.states`."""
        return self._run(self._client.states(ids))

    def watch(self, ids: Iterable[int], *, every_s: float = 1.0) -> Iterator[dict[str, int]]:
        """See `Client.watch`."""
        return self._each(self._client.watch(ids, every_s=every_s))

    def wait(self, ids: Iterable[int], *, timeout_s: float | None = None) -> dict[str, int]:
        """See `Client.wait`."""
        return self._run(self._client.wait(ids, timeout_s=timeout_s))

    def types(self) -> Sequence[Mapping[str, Any]]:
        """See `Client.types`."""
        return self._run(self._client.types())

    def owners(self) -> Mapping[str, str | None]:
        """See `Client.owners`."""
        return self._run(self._client.owners())

    def register_type(self, name: str, **settings: Any) -> Mapping[str, Any]:
        """See `Client.register_type`."""
        return self._run(self._client.register_type(name, **settings))

    def why(self, task_id: int) -> Mapping[str, Any]:
        """See `Client.why`."""
        return self._run(self._client.why(task_id))

    def backlog(
        self,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        *,
        limit: int | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """See `Client.backlog`."""
        return self._each(self._client.backlog(type, limit=limit))

    def operate(
        self,
        verb: Verb | str,
        which: TaskFilter,
        *,
        priority: Priority | str | None = None,
        rate: float | None = None,
        by: str | None = None,
        id: str | None = None,  # noqa: A002 (the platform's word for it)
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[int], None] | None = None,
        begun: Callable[[str], None] | None = None,
    ) -> Operated:
        """See `Client.operate`; `progress` and `begun` are called from another thread."""
        return self._run(
            self._client.operate(
                verb,
                which,
                priority=priority,
                rate=rate,
                by=by,
                id=id,
                dry_run=dry_run,
                wait=wait,
                progress=progress,
                begun=begun,
            )
        )

    def operations(
        self, *, verb: Verb | str | None = None, state: str | None = None, limit: int | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """See `Client.operations`."""
        return self._each(self._client.operations(verb=verb, state=state, limit=limit))

    def operation(self, id: str) -> Mapping[str, Any]:  # noqa: A002 (the platform's word for it)
        """See `Client.operation`."""
        return self._run(self._client.operation(id))

    def stop_operation(self, id: str, by: str | None = None) -> Mapping[str, Any]:  # noqa: A002 (as above)
        """See `Client.stop_operation`."""
        return self._run(self._client.stop_operation(id, by))

    def change_type(self, name: str, **settings: Any) -> Mapping[str, Any]:
        """See `Client.change_type`."""
        return self._run(self._client.change_type(name, **settings))

    def keys(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        *,
        key: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """See `Client.keys`."""
        return self._each(self._client.keys(type, key=key, limit=limit))

    def change_key(self, type: str, key: str, **settings: Any) -> Mapping[str, Any]:  # noqa: A002 (the platform's word)
        """See `Client.change_key`."""
        return self._run(self._client.change_key(type, key, **settings))

    def reset_key(self, type: str, key: str) -> bool:  # noqa: A002 (the platform's word for it)
        """See `Client.reset_key`."""
        return self._run(self._client.reset_key(type, key))

    def targets(
        self,
        *,
        state: str | None = None,
        prefix: str | None = None,
        url: str | None = None,
        namespace: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """See `Client.targets`."""
        return self._each(
            self._client.targets(state=state, prefix=prefix, url=url, namespace=namespace, limit=limit)
        )

    def target(self, url: str, namespace: str | None = None) -> Mapping[str, Any] | None:
        """See `Client.target`."""
        return self._run(self._client.target(url, namespace))

    def disable_target(self, url: str, why: str, namespace: str | None = None) -> Mapping[str, Any]:
        """See `Client.disable_target`."""
        return self._run(self._client.disable_target(url, why, namespace))

    def enable_target(self, url: str, namespace: str | None = None) -> Mapping[str, Any]:
        """See `Client.enable_target`."""
        return self._run(self._client.enable_target(url, namespace))

    def limit_target(self, url: str, rate: float | None, namespace: str | None = None) -> Mapping[str, Any]:
        """See `Client.limit_target`."""
        return self._run(self._client.limit_target(url, rate, namespace))

    def callbacks(
        self,
        *,
        target: str | None = None,
        namespace: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """See `Client.callbacks`."""
        return self._each(
            self._client.callbacks(
                target=target,
                namespace=namespace,
                task_id=task_id,
                state=state,
                since=since,
                until=until,
                limit=limit,
            )
        )

    def replay(
        self,
        ids: Sequence[str] | None = None,
        *,
        target: str | None = None,
        namespace: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Replayed:
        """See `Client.replay`; `progress` is called from another thread."""
        return self._run(
            self._client.replay(
                ids,
                target=target,
                namespace=namespace,
                task_id=task_id,
                state=state,
                since=since,
                until=until,
                rate=rate,
                dry_run=dry_run,
                progress=progress,
            )
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("use the client in a `with` block")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: the request must not go on behind our back.
            future.cancel()
            raise

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> tuple[bool, T | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        while True:
            more, item = self._run(following())
            if not more:
                return
            yield item  # type: ignore[misc] # there is one whenever there is more
