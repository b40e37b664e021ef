"""Receives callbacks over HTTP: verifies signatures and processes each event once.

    python -m examples.callbacks.receiver --secret whsec_… --port 9000 --effects hooks.db
    python -m examples.callbacks.receiver --public-key whpk_… --audience http://127.0.0.1:9000/hooks

Give http://127.0.0.1:9000/hooks as `callbacks` of a task.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from aiohttp import web

from examples.callbacks.effects import Effects
from examples.callbacks.verify import verify


def receiver(keys: list[str], effects: Effects, audience: str | None = None) -> web.Application:
    """Creates the application.

    Args:
        keys: `whsec_…` or `whpk_…`; while they are rotated, the new one and the old one.
        effects: what was done before.
        audience: the URL of this receiver, to refuse callbacks that were made for another one.
    """

    async def receive(request: web.Request) -> web.Response:
        # The signature covers the raw bytes, so verify before parsing.
        body = await request.read()
        if not verify(request.headers, body, keys, audience):
            return web.Response(status=401, text="the signature is not right\n")
        event = json.loads(body)
        first = effects.once(request.headers["webhook-id"], event)
        print("done " if first else "again", request.headers["webhook-id"], event["event"], flush=True)
        # Any 2xx. Do slow work after the response, because slow targets are diverted.
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/hooks", receive)
    return app


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(description="Receives callbacks.")
    parser.add_argument("--secret", action="append", default=[], help="whsec_…; repeatable")
    parser.add_argument("--public-key", action="append", default=[], help="whpk_…; repeatable")
    parser.add_argument("--audience", help="the URL of this receiver, as tasks name it")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--effects", type=Path, default=Path("effects.db"), help="database of the effects")
    given = parser.parse_args()
    keys = [*given.secret, *given.public_key]
    if not keys:
        parser.error("give --secret or --public-key")
    with Effects(given.effects) as effects:
        app = receiver(keys, effects, given.audience)
        web.run_app(app, host="127.0.0.1", port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
