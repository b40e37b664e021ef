"""A gateway, and the requests that are for another deployment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.gateways import Caller, running_gateway

from penstock.cli.main import cli
from penstock.client import Client
from penstock.discovery import DEPLOYMENT_HEADER, Addresses
from penstock.errors import OtherDeployment
from penstock.http.credentials import Credentials
from penstock.local.state import DataDir
from penstock.worker.gateway_client import GatewayClient


@pytest.fixture
async def gateway(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    monkeypatch.chdir(tmp_path)
    for name in ("PENSTOCK_GATEWAY", "PENSTOCK_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    async with running_gateway(
        kafka="127.0.0.1:1", postgres=database, objects=f"file://{tmp_path}"
    ) as caller:
        await caller.post("/types", {"name": "media"})
        yield caller


def directory(place: Path, gateway: str, deployment: str) -> DataDir:
    """A data directory as `penstock up` leaves it while it runs."""
    owned = DataDir(place)
    owned.publish(
        Addresses(
            pid=os.getpid(),
            gateway=gateway,
            kafka="127.0.0.1:1",
            postgres="postgresql://127.0.0.1:1/d",
            prefix="x.",
            objects="file:///o",
            deployment=deployment,
        )
    )
    return owned


async def test_a_gateway_refuses_requests_for_another_deployment(gateway: Caller) -> None:
    """O1: a request that names another deployment has no effect. Each answer names the
    gateway's."""
    listed = await gateway.get("/tasks")
    own = listed.headers[DEPLOYMENT_HEADER]
    refused = await gateway.post("/tasks", {"type": "media"}, headers={DEPLOYMENT_HEADER: "another"})
    assert refused.status == 421
    assert refused.body["type"] == "urn:penstock:problem:other-deployment"
    assert own in refused.body["detail"]
    assert "another" in refused.body["detail"]
    assert refused.headers[DEPLOYMENT_HEADER] == own
    assert (await gateway.get("/tasks")).body["tasks"] == []
    assert (await gateway.post("/tasks", {"type": "media"}, headers={DEPLOYMENT_HEADER: own})).status == 201


async def test_clients_and_verbs_use_only_the_deployment_of_their_directory(gateway: Caller) -> None:
    """O1: the deployment of the directory has ended, and the gateway of another one listens at its
    address. Client, worker and verbs refuse; its own gateway they use."""
    own = (await gateway.get("/tasks")).headers[DEPLOYMENT_HEADER]
    stale = directory(Path(".penstock"), gateway.url, "0f-another")
    async with Client() as client:
        with pytest.raises(OtherDeployment, match=f"belongs to the deployment {own}.*for 0f-another"):
            await client.submit("media")
    async with GatewayClient(gateway.url, Credentials.from_environment()) as worker:
        with pytest.raises(OtherDeployment):
            await worker.post("/hold_task", {"worker": "w", "type": "media", "wait_s": 0})
    for verb in (["list"], ["list", "--data-dir", ".penstock"]):
        # In a thread, because the gateway runs in this loop.
        outcome = await invoke(*verb)
        assert outcome[0] == 6, outcome
        assert "0f-another" in outcome[1]
    stale.close()
    assert (await gateway.get("/tasks")).body["tasks"] == []
    with_id = directory(Path(".penstock"), gateway.url, own)
    async with Client() as client:
        await client.submit("media")
    assert (await invoke("list"))[0] == 0
    with_id.close()
    elsewhere = directory(Path("elsewhere"), "http://127.0.0.1:1", "0f-another")
    async with Client(gateway.url, data_dir=Path("elsewhere")) as client:
        await client.submit("media")
    elsewhere.close()


async def invoke(*words: str) -> tuple[int, str]:
    outcome = await asyncio.to_thread(CliRunner().invoke, cli, words)
    return outcome.exit_code, outcome.output + outcome.stderr
