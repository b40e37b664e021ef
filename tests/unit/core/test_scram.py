"""Verifiers of passwords for SCRAM."""

import base64
import hashlib
import hmac

import pytest

from penstock.core.scram import password_fault, postgres_verifier, salted_password

# The exchange of RFC 7677, section 3.
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
MESSAGE = (
    b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
)
PROOF = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
SIGNATURE = base64.b64decode("6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


def test_a_verifier_accepts_the_exchange_of_the_standard():
    """O5: with its two keys a server verifies the client's proof of RFC 7677, and signs as the RFC
    says."""
    head, keys = postgres_verifier("pencil", SALT).rsplit("$", 1)
    assert head == f"SCRAM-SHA-256$4096:{base64.b64encode(SALT).decode()}"
    stored_key, server_key = (base64.b64decode(part) for part in keys.split(":"))
    signature = hmac.digest(stored_key, MESSAGE, "sha256")
    client_key = bytes(a ^ b for a, b in zip(signature, PROOF, strict=True))
    assert hashlib.sha256(client_key).digest() == stored_key
    assert hmac.digest(server_key, MESSAGE, "sha256") == SIGNATURE


def test_salts_and_algorithms_change_a_salted_password():
    """Two salts, or two algorithms, give different values of their own lengths."""
    found = [salted_password("pencil", salt, "sha512") for salt in (b"a" * 16, b"b" * 16)]
    assert found[0] != found[1]
    assert [len(each) for each in found] == [64, 64]
    assert len(salted_password("pencil", SALT, "sha256")) == 32


@pytest.mark.parametrize(
    ("password", "usable"), [("aB3-_ ~", True), ("", False), ("ä", False), ("a\n", False)]
)
def test_passwords_that_servers_would_normalise_are_refused(password, usable):
    """O5: a password with other characters would be another one for each server."""
    assert (password_fault(password) is None) == usable
