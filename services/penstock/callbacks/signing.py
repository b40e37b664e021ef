"""Signs callbacks by the Standard Webhooks convention, and binds them to their target. No I/O.

Each valid secret of a scope signs, so that receivers can verify during a rotation. The header
`webhook-signature` has one entry for each: `v1,…` (HMAC-SHA256) or `v1a,…` (ed25519).

A second header, `webhook-audience-signature`, signs the same message with `<URL> <id>` in place of
its id. A receiver that verifies it with its own URL accepts no callback that was made for another
one, even where both verify the same key. Any library of the convention verifies it, and receivers
that know only the convention ignore it. A URL has no blank, and an id neither a blank nor a dot, so
no two messages have the same signed bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from standardwebhooks import Webhook

from penstock.core.webhook_secrets import Scheme
from penstock.crypto import PrivateKey


class SigningKey(Protocol):
    """A secret that signs."""

    def sign(self, message_id: str, now: datetime, body: str) -> str:
        """An entry of `webhook-signature`."""
        ...


class SymmetricKey:
    """A secret that signs by HMAC-SHA256.

    Args:
        secret: `whsec_` and base64.
    """

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)

    def sign(self, message_id: str, now: datetime, body: str) -> str:
        """An entry of `webhook-signature`."""
        return self._webhook.sign(msg_id=message_id, timestamp=now, data=body)


class Ed25519Key:
    """A private key that signs by ed25519.

    Args:
        secret: `whsk_` and base64.
    """

    def __init__(self, secret: str) -> None:
        self._key = PrivateKey(secret)
        self.public = self._key.public

    def sign(self, message_id: str, now: datetime, body: str) -> str:
        """An entry of `webhook-signature`."""
        signature = self._key.sign(f"{message_id}.{int(now.timestamp())}.{body}".encode())
        return f"{Scheme.V1A},{base64.b64encode(signature).decode()}"


class UnusableSecrets(Exception):  # noqa: N818 (named after the event, like all errors here)
    """No secret of the scope that must sign can be used; the message says why."""


def signed_headers(
    keys: Sequence[SigningKey], message_id: str, url: str, body: bytes, now: datetime
) -> dict[str, str]:
    """The headers by which a target verifies a message.

    Args:
        keys: all of them sign.
        message_id: the same for all attempts.
        url: of the target.
        body: of the request, exactly; UTF-8.
        now: time of sending, in UTC.
    """
    text = body.decode()
    bound_id = f"{url} {message_id}"
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join([key.sign(message_id, now, text) for key in keys]),
        "webhook-audience-signature": " ".join([key.sign(bound_id, now, text) for key in keys]),
    }
