"""The adapter of `cryptography`: encryption of stored secrets, and ed25519 signatures.

Each stored secret is encrypted by AES-256-GCM with a key of PENSTOCK_ENCRYPTION_KEYS, a random
nonce, and its identity as associated data. So a row's secret cannot be moved to another row.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.core.webhook_secrets import PRIVATE_PREFIX, PUBLIC_PREFIX, encode, private_key_bytes

_NONCE_BYTES = 12


class UnreadableSecret(Exception):  # noqa: N818 (named after the event, like all errors here)
    """A stored secret cannot be decrypted; the message says why, and shows nothing of it."""


class Sealed(NamedTuple):
    """An encrypted secret.

    Attributes:
        key_id: names the key that decrypts it.
        data: nonce and ciphertext.
    """

    key_id: str
    data: bytes


class Sealer:
    """Encrypts secrets with the first key, and decrypts them with whichever key they need.

    Args:
        keys: each the base64 of 32 bytes, as `settings.Sealing` has checked.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        decoded = [base64.b64decode(key) for key in keys]
        self._ciphers = {key_id_of(key): AESGCM(key) for key in decoded}
        self.current_id = key_id_of(decoded[0]) if decoded else None

    def seal(self, secret: str, identity: str) -> Sealed:
        """Encrypts a secret.

        Args:
            secret: the text.
            identity: what the secret belongs to; only the same identity decrypts it.
        """
        assert self.current_id is not None, "there is no key"
        nonce = os.urandom(_NONCE_BYTES)
        ciphertext = self._ciphers[self.current_id].encrypt(nonce, secret.encode(), identity.encode())
        return Sealed(self.current_id, nonce + ciphertext)

    def open(self, sealed: Sealed, identity: str) -> str:
        """Decrypts a secret.

        Raises:
            UnreadableSecret: the key is not in the settings, or the row was changed.
        """
        cipher = self._ciphers.get(sealed.key_id)
        if cipher is None:
            raise UnreadableSecret(f"PENSTOCK_ENCRYPTION_KEYS lacks the key {sealed.key_id}")
        try:
            plain = cipher.decrypt(sealed.data[:_NONCE_BYTES], sealed.data[_NONCE_BYTES:], identity.encode())
        except (InvalidTag, ValueError) as error:
            raise UnreadableSecret("its row was changed outside Penstock") from error
        return plain.decode()


def key_id_of(key: bytes) -> str:
    """The name of an encryption key, which reveals nothing of it."""
    return hashlib.sha256(b"penstock encryption key" + key).hexdigest()[:8]


class PrivateKey:
    """An ed25519 private key.

    Args:
        text: `whsk_` and base64.
    """

    def __init__(self, text: str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key_bytes(text))

    @property
    def public(self) -> str:
        """Its public key: `whpk_` and base64."""
        return encode(PUBLIC_PREFIX, self._key.public_key().public_bytes_raw())

    def sign(self, content: bytes) -> bytes:
        """The signature of a content, 64 bytes."""
        return self._key.sign(content)


def generate_private_key() -> str:
    """A random ed25519 private key: `whsk_` and base64."""
    return encode(PRIVATE_PREFIX, Ed25519PrivateKey.generate().private_bytes_raw())


def is_signed(public_key: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the owner of a public key, 32 bytes, has signed a content."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except InvalidSignature:
        return False
    return True
