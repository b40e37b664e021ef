"""A target of callbacks that remembers which tasks it was told of, by a right signature; GET /told says which."""

import os
from pathlib import Path

from aiohttp import web
from standardwebhooks import Webhook

WEBHOOK = Webhook(os.environ["PENSTOCK_CALLBACK_SECRETS"])
told: dict[int, str] = {}


async def hook(request: web.Request) -> web.Response:
    event = WEBHOOK.verify(await request.read(), dict(request.headers))
    told[event["task"]["id"]] = event["task"]["state"]
    return web.Response(status=204)


async def tell(_request: web.Request) -> web.Response:
    return web.json_response(told)


async def mark(_app: web.Application) -> None:
    Path(os.environ["PENSTOCK_READY_FILE"]).touch()


app = web.Application()
app.on_startup.append(mark)
app.router.add_post("/hooks", hook)
app.router.add_get("/told", tell)
web.run_app(app, port=9000, access_log=None, print=None)
