"""Verifies callbacks: with a shared secret (v1) or a public key (v1a), and for one URL only."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook, WebhookVerificationError

TOLERANCE = timedelta(minutes=5)


def verify(headers: Mapping[str, str], body: bytes, keys: list[str], audience: str | None = None) -> bool:
    """Whether one of the keys verifies a callback.

    Args:
        headers: of the request.
        body: as received: the signature covers the raw bytes.
        keys: `whsec_…` or `whpk_…`; several while they are rotated.
        audience: the URL of this receiver, as tasks name it. A callback that was made for another
            URL is then refused. A receiver with a secret of its own needs no audience.
    """
    signed = {name.lower(): value for name, value in headers.items()}
    if audience is not None:
        # The same message with the URL in its id, so that every library can verify it.
        signed["webhook-id"] = f"{audience} {signed.get('webhook-id', '')}"
        signed["webhook-signature"] = signed.get("webhook-audience-signature", "")
    return any(
        _by_public_key(signed, body, key) if key.startswith("whpk_") else _by_secret(signed, body, key)
        for key in keys
    )


def _by_secret(signed: Mapping[str, str], body: bytes, secret: str) -> bool:
    try:
        Webhook(secret).verify(body, dict(signed))
    except (WebhookVerificationError, ValueError):
        return False
    return True


def _by_public_key(signed: Mapping[str, str], body: bytes, key: str) -> bool:
    try:
        sent_at = datetime.fromtimestamp(int(signed["webhook-timestamp"]), UTC)
        entries = [entry.split(",", 1) for entry in signed["webhook-signature"].split(" ")]
        public_key = Ed25519PublicKey.from_public_bytes(base64.b64decode(key.removeprefix("whpk_")))
    except (KeyError, ValueError, OverflowError):
        return False
    if abs(datetime.now(UTC) - sent_at) > TOLERANCE:
        return False
    content = f"{signed['webhook-id']}.{signed['webhook-timestamp']}.".encode() + body
    for version, *signature in entries:
        if version == "v1a" and signature:
            try:
                public_key.verify(base64.b64decode(signature[0]), content)
            except (InvalidSignature, ValueError):
                continue
            return True
    return False
