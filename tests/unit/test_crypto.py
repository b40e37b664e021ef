"""Encryption of stored secrets."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.webhook_secrets import public_key_bytes
from penstock.crypto import (
    PrivateKey,
    Sealed,
    Sealer,
    UnreadableSecret,
    generate_private_key,
    is_signed,
    key_id_of,
)
from penstock.errors import SettingsError
from penstock.settings import Sealing

OLD, NEW = (base64.b64encode(letter * 32).decode() for letter in (b"o", b"n"))


@given(secret=st.text(), identity=st.text(), other=st.text())
def test_a_secret_is_decrypted_with_its_identity_only(secret, identity, other):
    """C7: the ciphertext of one row is worthless in another row."""
    sealer = Sealer([NEW])
    sealed = sealer.seal(secret, identity)
    assert sealer.open(sealed, identity) == secret
    if other != identity:
        with pytest.raises(UnreadableSecret, match="changed outside"):
            sealer.open(sealed, other)


@given(secret=st.text(), position=st.integers(0), bit=st.integers(0, 7))
def test_no_bit_of_a_ciphertext_can_be_changed(secret, position, bit):
    """C7: a changed row is refused."""
    sealer = Sealer([NEW])
    sealed = sealer.seal(secret, "a")
    data = bytearray(sealed.data)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(UnreadableSecret):
        sealer.open(Sealed(sealed.key_id, bytes(data)), "a")


def test_the_first_key_encrypts_and_all_decrypt():
    """C7: after a new first key, secrets of the old one are readable until it is removed."""
    sealed = Sealer([OLD]).seal("s", "a")
    both = Sealer([NEW, OLD])
    assert both.open(sealed, "a") == "s"
    again = both.seal("s", "a")
    assert again.key_id == both.current_id == key_id_of(b"n" * 32) != sealed.key_id
    assert Sealer([NEW]).open(again, "a") == "s"
    with pytest.raises(UnreadableSecret, match=f"lacks the key {sealed.key_id}"):
        Sealer([NEW]).open(sealed, "a")


def test_the_same_secret_is_never_encrypted_to_the_same_bytes():
    """C7: equal secrets cannot be recognised."""
    sealer = Sealer([NEW])
    assert sealer.seal("s", "a") != sealer.seal("s", "a")


@given(st.binary())
def test_a_private_key_signs_for_its_public_key(content):
    """C7: ed25519 verifies with the public key alone, and no other content."""
    key = PrivateKey(generate_private_key())
    signature, public = key.sign(content), public_key_bytes(key.public)
    assert is_signed(public, signature, content)
    assert not is_signed(public, signature, content + b"x")
    assert not is_signed(public_key_bytes(PrivateKey(generate_private_key()).public), signature, content)


@pytest.mark.parametrize("key", ["short", "****", base64.b64encode(b"x" * 31).decode(), "ü" * 44])
def test_a_wrong_encryption_key_stops_the_start_and_is_not_shown(key):
    """C7: the error names the variable and the position."""
    with pytest.raises(SettingsError, match="PENSTOCK_ENCRYPTION_KEYS: number 2") as refused:
        Sealing.load({"PENSTOCK_ENCRYPTION_KEYS": f"{NEW},{key}"})
    assert key not in str(refused.value)
    assert NEW not in repr(Sealing.load({"PENSTOCK_ENCRYPTION_KEYS": NEW}))
