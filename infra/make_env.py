"""Writes .env for docker compose: a copy of .env.example, with random values for its empty secrets.

python infra/make_env.py .env.example .env

It never changes an existing .env, because the database was created with its password.
"""

import base64
import os
import re
import secrets
import sys
from pathlib import Path


def _random_secret(name: str) -> str:
    if name == "PENSTOCK_CALLBACK_SECRETS":
        return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    if name in ("PENSTOCK_ENCRYPTION_KEYS", "PENSTOCK_REPORT_KEYS"):
        return base64.b64encode(secrets.token_bytes(32)).decode()
    if name == "PENSTOCK_API_KEY":
        return f"pk_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"
    return secrets.token_hex(24)


def main() -> None:
    """Reads the example (first argument) and writes the target (second argument)."""
    example, target = map(Path, sys.argv[1:])
    text = re.sub(
        r"^(\w+)=$",
        lambda match: f"{match[1]}={_random_secret(match[1])}",
        example.read_text(),
        flags=re.MULTILINE,
    )
    # O_EXCL keeps an existing file, and 0600 keeps the secrets from other users.
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{target} exists already and was not changed")
    with os.fdopen(file, "w") as out:
        out.write(text)
    print(f"wrote {target} with random secrets")


main()
