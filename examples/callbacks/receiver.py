"""Receives callbacks over HTTP: verifies signatures and processes each event once.

    python -m examples.callbacks.receiver --secret whsec_… --port 9000 --effects hooks.db

Give http://127.0.0.1:9000/hooks as `callbacks` of a task.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from examples.callbacks.effects import Effects


def receiver(secrets: list[str], effects: Effects) -> web.Application:
    """Creates the application.

    Args:
        secrets: `whsec_…`; while they are rotated, the new one and the old one.
        effects: what was done before.
    """
    webhooks = [Webhook(secret) for secret in secrets]

    async def receive(request: web.Request) -> web.Response:
        # The signature covers the raw bytes, so verify before parsing.
        body = await request.read()
        for webhook in webhooks:
            try:
                event = webhook.verify(body, dict(request.headers))
            except WebhookVerificationError:
                continue
            first = effects.once(request.headers["webhook-id"], event)
            print("done " if first else "again", request.headers["webhook-id"], event["event"], flush=True)
            # Any 2xx. Do slow work after the response, because slow targets are diverted.
            return web.Response(status=204)
        return web.Response(status=401, text="the signature is not right\n")

    app = web.Application()
    app.router.add_post("/hooks", receive)
    return app


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(description="Receives callbacks.")
    parser.add_argument("--secret", action="append", required=True, help="whsec_…; repeatable")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--effects", type=Path, default=Path("effects.db"), help="database of the effects")
    given = parser.parse_args()
    with Effects(given.effects) as effects:
        app = receiver(given.secret, effects)
        web.run_app(app, host="127.0.0.1", port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
