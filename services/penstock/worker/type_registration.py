"""Registers the types of a worker's code at a gateway, before the worker takes its first task.

A registered type that differs is changed, or the start is refused, by choice of the code. With
`refuse`, the worker waits for the gateway. With `change`, it makes one attempt before it starts,
and further ones while it runs: a worker that uses Kafka needs no gateway to run tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.discovery import deployment_header
from penstock.errors import (
    Conflict,
    Forbidden,
    GatewayUnavailable,
    Invalid,
    NotFound,
    SettingsError,
    Unauthenticated,
    Unavailable,
    reason_of,
)
from penstock.http.credentials import Credentials
from penstock.http.problems import error_of
from penstock.outgoing_http import LARGE_HEADS, as_given
from penstock.sockets import make_socket
from penstock.worker.platform_client import until
from penstock.worker.settings import WorkerSettings
from penstock.worker.types import REFUSE, Type

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class TypeRegistration:
    """Registers types. A refused key is tried again for `refused_timeout_s`.

    Args:
        settings: of the worker, with the address of the gateway.
        types: the types of its code.
        mode: `types.CHANGE` or `types.REFUSE`.
        stages: (type, stage) of its handlers.

    Raises:
        SettingsError: there are types, and no gateway is set, or its address is no URL.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        types: Sequence[Type],
        mode: str,
        stages: Collection[tuple[str, str]],
    ) -> None:
        self._settings = settings
        self._began_s = time.monotonic()
        self._types = types
        self._mode = mode
        self._stages = stages
        self._url = (settings.worker_gateway or settings.gateway).rstrip("/")
        self._credentials = Credentials(settings.api_key, settings.api_key_file)
        self._pending = bool(types)
        if types and not self._url:
            raise SettingsError(
                "the worker registers types, and no gateway is set: set PENSTOCK_GATEWAY to its URL, or leave types out"
            )
        url = urlsplit(self._url)
        if types and not (url.scheme in ("http", "https") and url.hostname):
            raise SettingsError(f"PENSTOCK_GATEWAY={self._url!r} is not an http:// or https:// URL")

    async def before_start(self, stopping: asyncio.Event) -> bool:
        """Registers the types; returns at once when there are none.

        In the mode `change`, an unavailable gateway leaves them to `run`.

        Args:
            stopping: ends the wait for a gateway.

        Returns:
            False when the worker is to stop.

        Raises:
            SettingsError: a type is refused, or differs in the mode `refuse`.
        """
        if not self._pending:
            return True
        await until(stopping, self._before_start())
        return not stopping.is_set()

    async def _before_start(self) -> None:
        if self._mode == REFUSE:
            await self.run()
            return
        try:
            await self._register_all()
        except Unavailable as error:
            log.warning(
                "The types of this worker are not registered yet, because no gateway answers",
                extra={"event": "types_unregistered", "url": self._url, "error": str(error)},
            )

    async def run(self) -> None:
        """Returns once the types are registered; waits while the gateway is unavailable.

        Raises:
            SettingsError: see `before_start`.
        """
        if not self._pending:
            return
        await retry_until_available(
            self._register_all, waiting_for="registration of types", backoff=WORKER_BACKOFF
        )

    async def _register_all(self) -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=make_socket), timeout=_TIMEOUT, **LARGE_HEADS
        ) as session:
            for each in self._types:
                await self._register(session, each)
        self._pending = False

    async def _register(self, session: aiohttp.ClientSession, wanted: Type) -> None:
        try:
            try:
                registered = await self._request(session, "GET", f"/types/{wanted.name}")
            except NotFound:
                body = {"name": wanted.name, **wanted.settings()}
                registered = await self._request(session, "POST", "/types", body)
                log.info(
                    "The worker registered a type",
                    extra={"event": "type_registered", "task_type": wanted.name},
                )
            # After a registration, too: another worker may have registered it meanwhile.
            if differing := wanted.differences(registered):
                registered = await self._change(session, wanted, differing, registered)
        except (Invalid, Conflict) as error:
            raise SettingsError(f"Type({wanted.name!r}) is refused: {error}") from error
        except Unauthenticated as error:
            if time.monotonic() - self._began_s < self._settings.refused_timeout_s:
                # A gateway may not know a new key yet, and a file may be replaced.
                self._credentials = Credentials(self._settings.api_key, self._settings.api_key_file)
                raise Unavailable(
                    f"the gateway at {self._url} refuses the key in {self._credentials.source}: {error}"
                ) from error
            raise SettingsError(
                f"the gateway at {self._url} refuses the key in {self._credentials.source}: {error}"
            ) from error
        except Forbidden as error:
            raise SettingsError(
                f"the gateway at {self._url} refuses to register {wanted.name} ({error}): give {self._credentials.source} "
                "a key with the role admin; the role reader suffices while the registered type has the settings of the code"
            ) from error
        first = registered["first_stage"]
        if (wanted.name, first) not in self._stages:
            log.warning(
                "The worker has no handler for the first stage of a type that it registers",
                extra={"event": "first_stage_unhandled", "task_type": wanted.name, "stage": first},
            )

    async def _change(
        self,
        session: aiohttp.ClientSession,
        wanted: Type,
        differing: dict[str, Any],
        registered: dict[str, Any],
    ) -> dict[str, Any]:
        texts = [
            # Callbacks have secrets.
            name if name == "callbacks" else f"{name}={value!r} (registered: {registered.get(name)!r})"
            for name, value in differing.items()
        ]
        if self._mode == REFUSE:
            raise SettingsError(
                f"Type({wanted.name!r}) differs from the registered type: {', '.join(texts)}: correct the code, or the type "
                f"with `penstock types set {wanted.name}`"
            )
        if "partitions" in differing:
            raise SettingsError(
                f"Type({wanted.name!r}): {texts[list(differing).index('partitions')]}: partitions cannot be changed, so "
                "correct the code, or register another type"
            )
        changed = await self._request(session, "PATCH", f"/types/{wanted.name}", differing)
        log.info(
            "The worker changed the settings of a type",
            extra={
                "event": "type_changed",
                "task_type": wanted.name,
                "settings": ", ".join(sorted(differing)),
            },
        )
        return changed

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        headers = {
            **self._credentials.headers,
            **deployment_header(self._url),
            "Content-Type": "application/json",
        }
        data = None if body is None else orjson.dumps(body)
        try:
            url = as_given(self._url + path)
            async with session.request(method, url, data=data, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayUnavailable(f"no gateway answers at {self._url}: {reason_of(error)}") from error
        if response.status not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise error_of(response.status, content)
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict) or "first_stage" not in document:
            raise GatewayUnavailable(
                f"no gateway answers at {self._url}: {path} is answered by something else"
            )
        return document
