"""What a server keeps of a password for SCRAM (RFC 5802). Pure; the salt is an argument.

A verb sends these values in place of a password, so that no log of the server has it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

# The fewest that Kafka accepts, and PostgreSQL's default. More only delay each connection: the
# passwords of services are random.
ITERATIONS = 4096
SALT_BYTES = 16


def password_fault(password: str) -> str | None:
    """Why a password cannot be used; None when it can.

    PostgreSQL, Kafka and their clients normalise other characters differently.
    """
    if not password:
        return "it is empty"
    if not (password.isascii() and password.isprintable()):
        return "it must have printable ASCII characters only"
    return None


def salted_password(password: str, salt: bytes, algorithm: str, iterations: int = ITERATIONS) -> bytes:
    """The salted password, from which a server derives its keys.

    Args:
        password: as the client knows it; see `password_fault`.
        salt: random bytes.
        algorithm: `sha256` or `sha512`.
        iterations: rounds of the hash.
    """
    return hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, iterations)


def postgres_verifier(password: str, salt: bytes) -> str:
    """The text that PostgreSQL stores for a password and accepts in place of one.

    Args:
        password: as the client knows it; see `password_fault`.
        salt: random bytes.
    """
    salted = salted_password(password, salt, "sha256")
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored_key, server_key = hashlib.sha256(client_key).digest(), hmac.digest(salted, b"Server Key", "sha256")
    parts = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return f"SCRAM-SHA-256${ITERATIONS}:{parts[0]}${parts[1]}:{parts[2]}"
