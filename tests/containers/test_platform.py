"""docker-compose.yml in real containers. Tests that disturb the platform more run later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.containers.platform import REPLICAS, SERVICES, TIMEOUT_S, Load, Platform

pytestmark = pytest.mark.long


async def test_up_starts_all_replicas_and_prints_the_address(platform: Platform) -> None:
    """O3, O8: after `docker compose up` all containers are healthy, with two replicas of each
    processor. The last container prints the address, and `cli` works."""
    await platform.wait_healthy()
    assert "steps" in await platform.compose("run", "--rm", "cli", "types")
    assert f"Penstock is up: {platform.gateway_url}" in await platform.compose("logs", "where")


async def test_only_the_gateway_is_published_and_only_on_loopback(platform: Platform) -> None:
    """O5: only the gateway is published, on loopback. The backend network has no egress."""
    published = {}
    for service in REPLICAS.keys() - {"receiver"}:
        for container in await platform.containers(service):
            ports = json.loads(
                await platform.docker("inspect", "-f", "{{json .NetworkSettings.Ports}}", container)
            )
            for bindings in ports.values():
                if bindings:
                    published[service] = bindings
    assert published.keys() == {"gateway"}
    assert [binding["HostIp"] for binding in published["gateway"]] == ["127.0.0.1"]
    network = json.loads(await platform.docker("network", "inspect", f"{platform.name}_backend"))
    assert network[0]["Internal"]


@pytest.mark.parametrize("service", SERVICES)
async def test_services_run_without_root_and_cannot_write(platform: Platform, service: str) -> None:
    """O5: a service runs under an init and not as root, has no capabilities, and writes only to
    tmpfs and its volume."""
    script = "id -u; touch /x /usr/local/x ~/x 2>&1 | grep -c 'Read-only'; tr '\\0' ' ' </proc/1/cmdline; echo; grep CapBnd /proc/self/status"
    output = await platform.compose("exec", "-T", service, "sh", "-c", script)
    user, refused, first, capabilities = output.split("\n")[:4]
    assert (user, refused, first.split()[0]) == ("10001", "3", "tini")
    if service != "steps":
        assert int(capabilities.split()[1], 16) == 0


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "steps"])
async def test_each_service_has_a_role_of_its_own(platform: Platform, service: str) -> None:
    """O5: a service is not PostgreSQL's superuser. It has its own role, which may not log in to
    another service's place, and may not read what it does not need."""
    script = """
import asyncio, asyncpg, os
async def main():
    connection = await asyncpg.connect(os.environ["PENSTOCK_POSTGRES"])
    row = await connection.fetchrow("SELECT rolname, rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = current_user")
    refused = 0
    for statement in ("DROP TABLE penstock.task", "CREATE TABLE penstock.x ()", "DELETE FROM penstock.migration", "TABLE pg_authid"):
        try:
            await connection.execute(statement)
        except asyncpg.InsufficientPrivilegeError:
            refused += 1
    print(*row, refused)
asyncio.run(main())
"""
    output = await platform.compose("exec", "-T", service, "python", "-c", script)
    assert output.split() == [f"penstock_{service.replace('-', '_')}", "False", "False", "False", "4"]


async def test_a_worker_reaches_only_what_its_user_may(platform: Platform) -> None:
    """O5: Kafka accepts no client without credentials beyond its own loopback. The worker's user
    may not read events, and its container reads no metrics without the token."""
    script = """
import asyncio, os, socket, sys, urllib.error, urllib.request
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
user = dict(security_protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-512",
            sasl_plain_username="penstock-worker", sasl_plain_password=os.environ["PENSTOCK_KAFKA_PASSWORD"])
async def read(**options):
    consumer = AIOKafkaConsumer("penstock.events", bootstrap_servers="kafka:9092", **options)
    try:
        await consumer.start()
        await consumer.getone()
    except TopicAuthorizationFailedError:
        return "denied"
    except KafkaError:
        return "refused"
    finally:
        await consumer.stop()
print(asyncio.run(read()), asyncio.run(read(**user)),
      asyncio.run(read(**{**user, "sasl_plain_password": "wrong"})))
for port in (9093, 9094):
    try:
        socket.create_connection(("kafka", port), 20)
    except ConnectionRefusedError:
        print("closed")
for service in sys.argv[1:]:
    try:
        urllib.request.urlopen(f"http://{service}:9100/metrics", timeout=60)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    services = [name for name in SERVICES if name != "steps"]
    output = await platform.compose("exec", "-T", "steps", "python", "-c", script, *services)
    assert output.split() == ["refused", "denied", "refused", "closed", "closed", *["401"] * len(services)]


async def test_the_metrics_token_opens_the_metrics(platform: Platform) -> None:
    """O4: a client with the token of .env reads the metrics of a service."""
    script = """
import os, urllib.request
request = urllib.request.Request("http://stages:9100/metrics", headers={"Authorization": "Bearer " + os.environ["PENSTOCK_METRICS_TOKEN"]})
print(urllib.request.urlopen(request, timeout=60).read().decode().count("penstock_") > 0)
"""
    assert (await platform.compose("exec", "-T", "gateway", "python", "-c", script)).strip() == "True"


async def test_images_are_small(platform: Platform) -> None:
    """O5: besides the shared base image, the image of services has at most 215 MB (a
    quarter of it evaluates expressions of flows), and the base of workers 65 MB."""
    sizes = [
        int(await platform.docker("image", "inspect", "-f", "{{.Size}}", name))
        for name in ("python:3.13-slim", platform.images["services"], platform.images["worker"])
    ]
    base, services, worker = sizes
    assert services - base < 215_000_000
    assert worker - base < 65_000_000


async def test_the_worker_image_has_only_the_sdk(platform: Platform) -> None:
    """W1: the worker image has neither faust nor a database driver; the image of services has
    both."""
    names = ("penstock.worker", "aiokafka", "faust", "asyncpg", "hatchling")
    script = f"from importlib.util import find_spec; print(*[n for n in {names} if find_spec(n)])"
    found = {
        kind: (
            await platform.docker(
                "run", "--rm", "--entrypoint", "python", platform.images[kind], "-c", script
            )
        ).split()
        for kind in ("worker", "services")
    }
    assert found == {
        "worker": ["penstock.worker", "aiokafka"],
        "services": ["penstock.worker", "aiokafka", "faust", "asyncpg"],
    }


async def test_tasks_submitted_over_http_succeed(platform: Platform) -> None:
    """T5, C1: tasks submitted over HTTP succeed with their results, and the target receives
    their callbacks."""
    async with Load(platform) as load:
        await load.progress(20)
    async with platform.client() as client:
        task = await client.get(load.acknowledged[0])
    assert task.result == task.context


async def test_media_workers_scale(platform: Platform) -> None:
    """O3: four replicas of the media example's worker, built on the worker image, create video
    and thumbnail."""
    base = ("--build-arg", f"PENSTOCK_WORKER={platform.images['worker']}")
    await platform.docker(
        "build", "-f", "examples/media/Dockerfile", *base, "-t", platform.images["media"], "."
    )
    media = ("--profile", "media")
    await platform.compose(
        *media,
        "run",
        "--rm",
        "--no-deps",
        "worker",
        "python",
        "-m",
        "examples.media.clips",
        "/media/penstock/in",
        "1",
    )
    await platform.compose(
        *media, "up", "--detach", "--no-recreate", "--no-deps", "--scale", "worker=4", "worker"
    )
    await platform.wait_healthy(worker=4)
    async with platform.client() as client:
        await client.register_type("media", first_stage="probe", max_attempts=1)
        out = "/media/penstock"
        files = [f"{out}/in/clip-1.mkv", f"{out}/in/broken.mkv"]
        good, broken = [await client.submit("media", {"file": file, "out": out}) for file in files]
        await client.wait([good.id, broken.id], timeout_s=TIMEOUT_S)
        states = [(await client.get(task.id)).state for task in (good, broken)]
        result = (await client.get(good.id)).result
    assert states == ["succeeded", "failed"]
    # The results are in the volume, which other containers mount.
    await platform.compose(
        *media,
        "run",
        "--rm",
        "--no-deps",
        "worker",
        "test",
        "-s",
        result["thumbnail"],
        "-a",
        "-s",
        result["video"],
    )
    await platform.compose(*media, "rm", "--stop", "--force", "worker")


# A service with two replicas, and a server; the fault tests kill each of the others.
@pytest.mark.parametrize("service", ["stages", "postgres"])
async def test_a_killed_container_loses_no_task(platform: Platform, service: str) -> None:
    """O1: after `docker kill` of one container under load, the other replica continues, and no
    acknowledged task is lost."""
    victim = (await platform.containers(service))[0]
    async with Load(platform) as load:
        await platform.docker("kill", victim)
        if REPLICAS[service] > 1:
            await load.progress()
        await platform.docker("start", victim)
        await load.progress()
    await platform.wait_healthy()


async def test_rolling_recreation_loses_no_task(platform: Platform) -> None:
    """O1: recreating every service in turn under load, like an upgrade, loses no task."""
    async with Load(platform) as load:
        for service in SERVICES:
            before = await platform.containers(service)
            await platform.compose("up", "--detach", "--no-deps", "--force-recreate", service)
            await platform.wait_healthy()
            assert not set(before) & set(await platform.containers(service))
            await load.progress()


async def test_down_and_up_keep_all_tasks(platform: Platform) -> None:
    """O1, O2b: after `down` and `up` all tasks exist, work continues, and `penstock check` is
    clean."""
    async with Load(platform):
        pass
    async with platform.client() as client:
        before = [(task.id, task.state) async for task in client.list(type="steps")]
        await platform.compose("down")
        assert not await platform.running()
        await platform.compose("up", "--detach")
        assert before
        assert [(task.id, task.state) async for task in client.list(type="steps")] == before
    async with Load(platform) as load:
        await load.progress()
    await platform.check()


def test_compose_refuses_missing_secrets(engine: None, tmp_path: Path) -> None:
    """O5: compose names a missing secret and the command that creates it; .env.example has no
    secrets."""
    found = Platform(tmp_path)
    for secret in found.secrets:
        other_secrets = tmp_path / "others"
        other_secrets.write_text(
            "".join(f"{name}={value}\n" for name, value in found.secrets.items() if name != secret)
        )
        done = found.docker_now(
            "compose", "--env-file", str(other_secrets), "-f", "docker-compose.yml", "config", check=False
        )
        assert done.returncode
        assert secret in done.stderr
        assert "make .env" in done.stderr
    done = found.docker_now(
        "compose", "--env-file", ".env.example", "-f", "docker-compose.yml", "config", check=False
    )
    assert done.returncode
