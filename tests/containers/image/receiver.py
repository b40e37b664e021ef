"""A callback target that verifies signatures; GET /received returns the state of each received
task."""

import os
from pathlib import Path

from aiohttp import web
from standardwebhooks import Webhook

WEBHOOK = Webhook(os.environ["PENSTOCK_CALLBACK_SECRETS"])
received: dict[int, str] = {}


async def hook(request: web.Request) -> web.Response:
    event = WEBHOOK.verify(await request.read(), dict(request.headers))
    received[event["task"]["id"]] = event["task"]["state"]
    return web.Response(status=204)


async def list_received(_request: web.Request) -> web.Response:
    return web.json_response(received)


async def create_ready_file(_app: web.Application) -> None:
    Path(os.environ["PENSTOCK_READY_FILE"]).touch()


app = web.Application()
app.on_startup.append(create_ready_file)
app.router.add_post("/hooks", hook)
app.router.add_get("/received", list_received)
web.run_app(app, port=9000, access_log=None, print=None)
