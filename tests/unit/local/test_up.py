"""The summary of `penstock up`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.local.database import EmbeddedPostgres
from penstock.local.supervisor import Supervisor
from penstock.local.up import _summary


@pytest.mark.parametrize("embedded", [True, False])
def test_the_summary_has_no_password(tmp_path: Path, embedded: bool) -> None:
    """O8: terminals and the logs of CI keep what `up` prints. A file that only its owner reads has
    the password of the embedded server."""
    postgres = EmbeddedPostgres(cast("Supervisor", None), tmp_path / "postgres")
    postgres._password = "s3cr3t"
    deployment: Any = SimpleNamespace(
        embedded_postgres=postgres if embedded else None,
        postgres="postgresql://u:s3cr3t@db.example/x",
        gateway_url="http://127.0.0.1:8420",
        kafka="127.0.0.1:9092",
        addresses=SimpleNamespace(objects="file:///objects"),
        data_dir=tmp_path,
        log_file=tmp_path / "log",
        callback_secret_file=tmp_path / "callback-secret",
    )
    shown = _summary(deployment, "")
    assert "s3cr3t" not in shown
    assert ("postgresql://postgres:***@127.0.0.1" in shown) == embedded
    assert (f"password in {tmp_path / 'postgres' / 'password'}" in shown) == embedded
    assert ("postgresql://u:***@db.example/x" in shown) != embedded
