"""Verifies callbacks by the Standard Webhooks convention, written from its text alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

TOLERANCE_S = 300


def verifies(headers: Mapping[str, str], body: bytes, key: str, *, audience: str | None = None) -> bool:
    """Whether a key verifies a message.

    Args:
        headers: of the request.
        body: of the request, exactly.
        key: `whsec_…` or `whpk_…`.
        audience: the receiver's URL, to verify that the message was made for it.
    """
    named = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp = named["webhook-id"], named["webhook-timestamp"]
    if abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    entries = named["webhook-signature" if audience is None else "webhook-audience-signature"].split(" ")
    signed_id = message_id if audience is None else f"{audience} {message_id}"
    content = b".".join([signed_id.encode(), timestamp.encode(), body])
    prefix, _, encoded = key.partition("_")
    decoded = base64.b64decode(encoded)
    for entry in entries:
        version, _, signature = entry.partition(",")
        raw = base64.b64decode(signature)
        if prefix == "whsec" and version == "v1":
            if hmac.compare_digest(raw, hmac.digest(decoded, content, hashlib.sha256)):
                return True
        elif prefix == "whpk" and version == "v1a":
            try:
                Ed25519PublicKey.from_public_bytes(decoded).verify(raw, content)
            except InvalidSignature:
                continue
            return True
    return False


def versions(headers: Mapping[str, str]) -> list[str]:
    """The versions of a message's signatures."""
    named = {name.lower(): value for name, value in headers.items()}
    return [entry.partition(",")[0] for entry in named["webhook-signature"].split(" ")]
