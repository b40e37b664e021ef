"""Signatures by the Standard Webhooks convention."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime

from standardwebhooks import Webhook

SECRET_PREFIX = "whsec_"  # noqa: S105 (the mark before a secret, not a secret)
# The convention's bounds for a symmetric key.
_KEY_BYTES = range(24, 65)


def secret_problem(secret: str) -> str | None:
    """What is wrong with a secret, without telling it; None when nothing is."""
    if not secret.startswith(SECRET_PREFIX):
        return f"does not begin with {SECRET_PREFIX}"
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return f"is not base64 after {SECRET_PREFIX}"
    if len(key) not in _KEY_BYTES:
        return f"has {len(key)} bytes, and must have {_KEY_BYTES[0]} to {_KEY_BYTES[-1]}"
    return None


class Signer:
    """Signs with every active secret, so that a target may know the old or the new one while they are rotated.

    Args:
        secrets: each `whsec_` and base64.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self._webhooks = [Webhook(secret) for secret in secrets]

    def headers(self, message_id: str, body: bytes, now: datetime) -> dict[str, str]:
        """The three headers that let a target verify a message.

        Args:
            message_id: the same for all attempts.
            body: what is sent, to the byte; UTF-8.
            now: when it is sent, in UTC.
        """
        text = body.decode()
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(
                webhook.sign(msg_id=message_id, timestamp=now, data=text) for webhook in self._webhooks
            ),
        }
