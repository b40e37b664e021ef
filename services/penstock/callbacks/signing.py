"""Signatures by the Standard Webhooks convention."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime

from standardwebhooks import Webhook

SECRET_PREFIX = "whsec_"  # noqa: S105 (a prefix, not a secret)
# The bounds of the convention for a symmetric secret.
_SECRET_BYTES = range(24, 65)


def secret_problem(secret: str) -> str | None:
    """The problem of an invalid secret, without showing it; None for a valid one."""
    if not secret.startswith(SECRET_PREFIX):
        return f"does not begin with {SECRET_PREFIX}"
    try:
        decoded = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return f"is not base64 after {SECRET_PREFIX}"
    if len(decoded) not in _SECRET_BYTES:
        return f"has {len(decoded)} bytes, and must have {_SECRET_BYTES[0]} to {_SECRET_BYTES[-1]}"
    return None


class Signer:
    """Signs with every active secret, so that targets can verify during a rotation.

    Args:
        secrets: each `whsec_` and base64.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self._webhooks = [Webhook(secret) for secret in secrets]

    def headers(self, message_id: str, body: bytes, now: datetime) -> dict[str, str]:
        """The three headers by which a target verifies a message.

        Args:
            message_id: the same for all attempts.
            body: of the request, exactly; UTF-8.
            now: time of sending, in UTC.
        """
        text = body.decode()
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(
                webhook.sign(msg_id=message_id, timestamp=now, data=text) for webhook in self._webhooks
            ),
        }
