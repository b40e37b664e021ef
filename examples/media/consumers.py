"""The two ways to receive the outcome of a task: a signed HTTP callback, and the topic `events`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiokafka import AIOKafkaConsumer
from standardwebhooks import Webhook, WebhookVerificationError


@asynccontextmanager
async def callback_receiver(secret: str, on_event: Callable[[dict[str, Any]], None]) -> AsyncIterator[str]:
    """Listens on a loopback port for callbacks; yields the URL to give to Penstock.

    Args:
        secret: `whsec_…`, the one Penstock signs with.
        on_event: called with each event whose signature is valid.
    """
    webhook = Webhook(secret)

    async def receive(request: web.Request) -> web.Response:
        try:
            # The signature covers the raw bytes, so verify before parsing.
            event = webhook.verify(await request.read(), dict(request.headers))
        except WebhookVerificationError as error:
            return web.Response(status=401, text=str(error))
        on_event(event)
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/media", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/media"
    finally:
        await runner.cleanup()


async def consume_events(kafka: str, prefix: str, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Reads the topic `events` from its beginning, until cancelled.

    Args:
        kafka: bootstrap servers.
        prefix: of the deployment's topics.
        on_event: called with each event; an event may come more than once, with the same id.
    """
    consumer = AIOKafkaConsumer(f"{prefix}events", bootstrap_servers=kafka, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async for record in consumer:
            on_event(orjson.loads(record.value))
    finally:
        await consumer.stop()
