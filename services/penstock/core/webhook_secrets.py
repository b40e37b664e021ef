"""Secrets that sign callbacks: their form, the scopes that they belong to, and references. Pure.

By the Standard Webhooks convention a symmetric secret (`v1`, HMAC-SHA256) is `whsec_` and base64, a
private key (`v1a`, ed25519) `whsk_` and base64, and its public key `whpk_` and base64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from penstock.core.access import EVERY_NAMESPACE
from penstock.core.target import TargetId

# The bounds of the Standard Webhooks convention for a symmetric secret.
SYMMETRIC_BYTES = range(24, 65)
ED25519_BYTES = 32
# Some libraries keep a private key together with its public key.
ED25519_PAIR_BYTES = 64

SYMMETRIC_PREFIX = "whsec_"
PRIVATE_PREFIX = "whsk_"
PUBLIC_PREFIX = "whpk_"

# A reference names a variable below this prefix, or a file of one folder. A reference to anything
# else could sign with a value that was never meant as a secret of callbacks.
REFERENCE_VARIABLE_PREFIX = "PENSTOCK_SECRET_"
_REFERENCE = re.compile(r"(env):([A-Z0-9][A-Z0-9_]{0,99})|(file):([A-Za-z0-9_][A-Za-z0-9._-]{0,99})")


class Scheme(StrEnum):
    """How a secret signs, as the signature header names it."""

    V1 = "v1"
    """HMAC-SHA256 with a secret that sender and receiver share."""
    V1A = "v1a"
    """ed25519 with a private key; receivers have the public key and cannot sign."""


class Scope(NamedTuple):
    """The targets whose callbacks a secret may sign.

    Attributes:
        namespace: the namespace; `*` is the deployment.
        url: the target; empty for all targets.
    """

    namespace: str
    url: str = ""


DEPLOYMENT = Scope(EVERY_NAMESPACE)


def scopes_of(target: TargetId) -> tuple[Scope, Scope, Scope]:
    """The scopes whose secrets may sign for a target; the first one that has secrets signs."""
    return Scope(*target), Scope(target.namespace), DEPLOYMENT


class Reference(NamedTuple):
    """The place of a secret that PostgreSQL does not have.

    Attributes:
        kind: `env` or `file`.
        name: of the variable without its prefix, or of the file in the folder.
    """

    kind: str
    name: str


def parse_reference(text: str) -> Reference:
    """The reference that a text means.

    Raises:
        ValueError: it is none; the message says what one is.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"a reference is env:NAME, for the variable {REFERENCE_VARIABLE_PREFIX}NAME of the callbacks service, or "
            "file:NAME, for a file in its PENSTOCK_CALLBACK_SECRETS_DIR"
        )
    return Reference(match[1] or match[3], match[2] or match[4])


def secret_problem(secret: str, scheme: Scheme = Scheme.V1) -> str | None:
    """The problem of an invalid secret, without showing it; None for a valid one."""
    prefix = SYMMETRIC_PREFIX if scheme is Scheme.V1 else PRIVATE_PREFIX
    if not secret.startswith(prefix):
        return f"does not begin with {prefix}"
    try:
        decoded = _decode(secret.removeprefix(prefix))
    except ValueError:
        return f"is not base64 after {prefix}"
    sizes: Sequence[int] = SYMMETRIC_BYTES if scheme is Scheme.V1 else (ED25519_BYTES, ED25519_PAIR_BYTES)
    if len(decoded) not in sizes:
        joined = f"{sizes[0]} to {sizes[-1]}" if scheme is Scheme.V1 else f"{sizes[0]} or {sizes[-1]}"
        return f"has {len(decoded)} bytes, and must have {joined}"
    return None


def private_key_bytes(secret: str) -> bytes:
    """The 32 bytes of a private key that `secret_problem` accepts."""
    return _decode(secret.removeprefix(PRIVATE_PREFIX))[:ED25519_BYTES]


def public_key_bytes(text: str) -> bytes:
    """The 32 bytes of a public key.

    Raises:
        ValueError: it is none.
    """
    decoded = _decode(text.removeprefix(PUBLIC_PREFIX)) if text.startswith(PUBLIC_PREFIX) else b""
    if len(decoded) != ED25519_BYTES:
        raise ValueError(f"a public key is {PUBLIC_PREFIX} and the base64 of {ED25519_BYTES} bytes")
    return decoded


def encode(prefix: str, value: bytes) -> str:
    """A secret or a key as text."""
    return prefix + base64.b64encode(value).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError("not base64") from error


def secrets_in(text: str) -> list[str]:
    """The secrets of a variable or file: separated by commas or white space; all of them sign."""
    return text.replace(",", " ").split()
