"""`penstock targets secrets` against a real gateway."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.gateways import running_gateway
from tests.support.invoking import invoker

from penstock.core.webhook_secrets import encode

URL = "https://shop.example/hooks"
KEY = base64.b64encode(b"k" * 32).decode()


penstock = invoker("targets", "secrets")


async def test_secrets_are_created_rotated_and_revoked(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7, O8: the secret alone is on standard output, once; what concerns it is on standard error.

    No list shows it, and a secret of one's own comes from a file or from standard input.
    """
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") and not name.startswith("PENSTOCK_TEST_"):
            monkeypatch.delenv(name)
    async with running_gateway(**where, encryption_keys=(KEY,)) as gateway:
        monkeypatch.setenv("PENSTOCK_GATEWAY", gateway.url)
        assert "PENSTOCK_CALLBACK_SECRETS" in (await penstock("list")).stdout
        created = await penstock("create", URL)
        assert created.exit_code == 0, created.output
        secret = created.stdout.strip()
        assert secret.startswith("whsec_")
        assert "shown only once" in created.stderr
        [listed] = map(json.loads, (await penstock("list", "--json")).stdout.splitlines())
        shown = await penstock("list")
        assert listed["id"] in shown.stdout
        assert secret not in shown.output
        rotated = await penstock("rotate", listed["id"], "--overlap", "1h")
        assert rotated.stdout.strip() not in ("", secret)
        assert f"{listed['id']} signs too until" in rotated.stderr
        revoked = await penstock("revoke", listed["id"])
        assert revoked.stdout.startswith(f"{listed['id']} is revoked; it signed for {URL}")

        given = encode("whsec_", b"own" * 10)
        own = await penstock("create", "--secret-file", "-", input=given + "\n")
        assert (own.exit_code, own.stdout) == (0, "")
        assert given not in own.output
        pair = await penstock("create", "--deployment", "--scheme", "v1a", "--overlap", "1d")
        assert pair.stdout.startswith("whpk_")
        # The namespace's own secret is symmetric, and `beta` has none.
        assert (await penstock("public-keys")).stdout.startswith("no public keys")
        assert (await penstock("public-keys", "--namespace", "beta")).stdout == pair.stdout
        by_reference = await penstock("create", "--reference", "env:SHOP", "--json")
        document = json.loads(by_reference.stdout)
        assert (document["reference"], document["secret"]) == ("env:SHOP", None)
        assert "0 secrets were encrypted again" in (await penstock("reencrypt")).stdout

        for status, arguments in (
            (2, ("create", URL, "--deployment")),
            (2, ("create", "--overlap", "soon")),
            (3, ("create", "ftp://files.example")),
            (3, ("create", "--reference", "env:lower")),
            (4, ("create", "--namespace", "nobody")),
            (4, ("revoke", "0" * 16)),
            (3, ("create", "--scheme", "v1a", "--secret-file", "-")),
        ):
            refused = await penstock(*arguments, input=given)
            assert refused.exit_code == status, (arguments, refused.output)
            assert given not in refused.output
