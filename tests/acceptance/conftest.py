"""Deployments on the servers that all tests share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from penstock.local.deployment import Options


@pytest.fixture
def shared_options(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> partial[Options]:
    """Options of a deployment on the shared servers; further arguments of `Options` may be
    added."""
    return partial(
        Options,
        data_dir=tmp_path / "data",
        kafka=kafka_servers,
        postgres=database,
        prefix=prefix,
        gateway_port=0,
    )
