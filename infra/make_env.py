"""Writes .env for docker compose: a copy of .env.example, with random values for the secrets it leaves empty.

python infra/make_env.py .env.example .env

An .env that is there stays as it is: its database knows the password in it.
"""

import base64
import os
import re
import secrets
import sys
from pathlib import Path


def _fresh(name: str) -> str:
    if name == "PENSTOCK_CALLBACK_SECRETS":
        return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    if name == "PENSTOCK_API_KEY":
        return f"pk_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"
    return secrets.token_hex(24)


def main() -> None:
    """The command line: the example, and what is to be written."""
    example, target = map(Path, sys.argv[1:])
    text = re.sub(
        r"^(\w+)=$", lambda found: f"{found[1]}={_fresh(found[1])}", example.read_text(), flags=re.MULTILINE
    )
    # Never over another, and for nobody else to read.
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{target} is there already, and stays as it is")
    with os.fdopen(file, "w") as out:
        out.write(text)
    print(f"wrote {target} with fresh secrets")


main()
