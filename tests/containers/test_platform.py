"""docker-compose.yml in real containers: what it starts, and how work goes through it. The order is by what disturbs more."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.containers.platform import PATIENCE_S, REPLICAS, SERVICES, Load, Platform, draft
from tests.waiting import wait_until


async def test_up_brings_two_of_each_and_says_where_to_go(platform: Platform) -> None:
    """O3, O8: after `docker compose up` everything is healthy, two of each processor; the last container tells the address; `cli` works."""
    await platform.wait_healthy()
    assert "steps" in await platform.compose("run", "--rm", "cli", "types")
    assert f"Penstock is up: {platform.gateway_url}" in await platform.compose("logs", "where")


async def test_only_the_gateway_is_published_and_only_on_loopback(platform: Platform) -> None:
    """O5: nothing but the gateway can be reached from outside; the network behind has no way out."""
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
    """O5: a service is not root, has no capabilities, writes nowhere but to tmpfs and its volume, and has an init above it."""
    tell = "id -u; touch /x /usr/local/x ~/x 2>&1 | grep -c 'Read-only'; tr '\\0' ' ' </proc/1/cmdline; echo; grep CapBnd /proc/self/status"
    said = await platform.compose("exec", "-T", service, "sh", "-c", tell)
    user, refused, first, capabilities = said.split("\n")[:4]
    assert (user, refused, first.split()[0]) == ("10001", "3", "tini")
    if service != "steps":
        assert int(capabilities.split()[1], 16) == 0


async def test_images_are_small(platform: Platform) -> None:
    """O5: on top of the base image, which every image shares, the services' has 145 MB at most and the base of workers 65 MB."""
    sizes = [
        int(await platform.docker("image", "inspect", "-f", "{{.Size}}", name))
        for name in ("python:3.13-slim", platform.images["services"], platform.images["worker"])
    ]
    base, services, worker = sizes
    assert services - base < 145_000_000
    assert worker - base < 65_000_000


async def test_base_of_workers_has_the_sdk_alone(platform: Platform) -> None:
    """W1: users' workers carry neither faust nor a database driver; the image of the services has both."""
    names = ("penstock.worker", "aiokafka", "faust", "asyncpg", "hatchling")
    ask = f"from importlib.util import find_spec; print(*[n for n in {names} if find_spec(n)])"
    found = {
        kind: (
            await platform.docker("run", "--rm", "--entrypoint", "python", platform.images[kind], "-c", ask)
        ).split()
        for kind in ("worker", "services")
    }
    assert found == {
        "worker": ["penstock.worker", "aiokafka"],
        "services": ["penstock.worker", "aiokafka", "faust", "asyncpg"],
    }


async def test_http_submission_goes_all_the_way(platform: Platform) -> None:
    """T5, C1: tasks submitted over HTTP succeed with their results, and the container that is their target is told of each."""
    async with Load(platform) as load:
        await load.progress(20)
    async with platform.client() as client:
        task = await client.get(load.acknowledged[0])
    assert task.result == task.context


async def test_console_producer_submits(platform: Platform) -> None:
    """T5: what Kafka's own console producer writes becomes tasks, which succeed, and call back."""
    run = secrets.token_hex(4)
    lines = "".join(json.dumps({**draft(f"{run}-{one}"), "labels": {"run": run}}) + "\n" for one in range(10))
    producer = ("/opt/kafka/bin/kafka-console-producer.sh", "--bootstrap-server", "localhost:9092")
    await platform.compose("exec", "-T", "kafka", *producer, "--topic", "penstock.submitted", stdin=lines)
    async with platform.client() as client:

        async def succeeded() -> list[int]:
            ids = [task.id async for task in client.list(labels={"run": run}, state="succeeded")]
            return ids if len(ids) == 10 else []

        ids = await wait_until(
            succeeded, timeout=PATIENCE_S, every=0.2, what="ten tasks from the topic succeed"
        )

    async def told() -> bool:
        return set(ids) <= set(await platform.told())

    await wait_until(told, timeout=PATIENCE_S, every=0.2, what="the target is told of all ten")


async def test_media_workers_scale(platform: Platform) -> None:
    """O3: the media example's worker, built on the base of workers, runs four times and makes the video and its thumbnail."""
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
        await client.wait([good.id, broken.id], timeout_s=PATIENCE_S)
        states = [(await client.get(task.id)).state for task in (good, broken)]
        result = (await client.get(good.id)).result
    assert states == ["succeeded", "failed"]
    # In the volume, where the next container finds them.
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


@pytest.mark.parametrize("service", [*SERVICES, "kafka", "postgres"])
async def test_kill_loses_nothing(platform: Platform, service: str) -> None:
    """O1: `docker kill` of one container under load: its twin goes on without it, and nothing that was acknowledged is lost."""
    victim = (await platform.containers(service))[0]
    async with Load(platform) as load:
        await platform.docker("kill", victim)
        if REPLICAS[service] > 1:
            await load.progress()
        await platform.docker("start", victim)
        await load.progress()
    await platform.wait_healthy()


@pytest.mark.parametrize("service", ["kafka", "postgres"])
async def test_network_loss_is_noticed_and_survived(platform: Platform, service: str) -> None:
    """O1, O4: a server that is cut off under load makes the gateway unhealthy; once it is back everything goes on, nothing is lost."""
    network = f"{platform.name}_backend"
    [server] = await platform.containers(service)
    async with Load(platform) as load:
        await platform.docker("network", "disconnect", network, server)

        async def noticed() -> bool:
            return "unhealthy" in (await platform.running())["gateway"]

        await wait_until(noticed, timeout=PATIENCE_S, every=0.5, what="the gateway is unhealthy")
        await platform.docker("network", "connect", "--alias", service, network, server)
        await load.progress()
    await platform.wait_healthy()


async def test_rolling_recreation_loses_nothing(platform: Platform) -> None:
    """O1: every service in turn is made again under load, as an upgrade does it, and nothing is lost."""
    async with Load(platform) as load:
        for service in SERVICES:
            before = await platform.containers(service)
            await platform.compose("up", "--detach", "--no-deps", "--force-recreate", service)
            await platform.wait_healthy()
            assert not set(before) & set(await platform.containers(service))
            await load.progress()


async def test_down_and_up_keep_everything(platform: Platform) -> None:
    """O1, O2b: after `down` and `up` the tasks are there, work goes on, and `penstock check` finds nothing in limbo."""
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


def test_without_secrets_nothing_starts(engine: None, tmp_path: Path) -> None:
    """O5: a secret that is missing is named, with what to do; the example has none in it."""
    found = Platform(tmp_path)
    for secret in ("POSTGRES_PASSWORD", "PENSTOCK_CALLBACK_SECRETS", "PENSTOCK_API_KEY", "GRAFANA_PASSWORD"):
        others = tmp_path / "others"
        others.write_text(
            "".join(f"{name}={value}\n" for name, value in found.secrets.items() if name != secret)
        )
        done = found.docker_now(
            "compose", "--env-file", str(others), "-f", "docker-compose.yml", "config", check=False
        )
        assert done.returncode
        assert secret in done.stderr
        assert "make .env" in done.stderr
    done = found.docker_now(
        "compose", "--env-file", ".env.example", "-f", "docker-compose.yml", "config", check=False
    )
    assert done.returncode
