"""Alerts fire on the series of real outages: processes are scraped while a server is away."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.deployment import METRICS_PORT, SERVICES, Deployment, Options
from penstock.local.ports import choose_port
from penstock.local.supervisor import Supervisor
from penstock.postgres.flows import SHARDS
from tests.chaos.outages import frozen
from tests.support.callback_targets import SECRET
from tests.support.gateways import Caller
from tests.support.memory_folder import make_folder
from tests.support.recorded_series import STEP_S, Recorder
from tests.support.waiting import wait_until

RULES = Path(__file__).parents[2] / "infra" / "observability" / "alerts.yml"
# Steps that an outage is continued with, so that alerts with `for` fire.
HELD = 40
# Steps within which the most urgent ones fire: three minutes and a half.
SOON = 14
HOUR = 3600 // STEP_S


def judged(recorder: Recorder, folder: Path, alerts: Iterable[str]) -> str:
    """Returns the failures of promtool for the alerts that fire at the end of the series."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing: it is in Debian's package prometheus")
    at_s = (recorder.steps - 1) * STEP_S
    case: dict[str, Any] = {
        "interval": f"{STEP_S}s",
        "input_series": recorder.input_series(),
        "alert_rule_test": [
            {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []} for alert in alerts
        ],
    }
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{STEP_S}s", "tests": [case]}
    (folder / "case.json").write_text(json.dumps(document))
    done = subprocess.run(
        [tool, "test", "rules", "case.json"], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def firing(recorder: Recorder, folder: Path, alert: str) -> set[str]:
    """The jobs for which an alert fires at the end of the recorded series, or "" without a job."""
    output = judged(recorder, folder, [alert])
    if not output:
        return set()
    got = output.rpartition("got:")[2]
    assert f'alertname="{alert}"' in got, output
    return {name for name in SERVICES if f'job="penstock-{name}"' in got} or {""}


@asynccontextmanager
async def recorded(
    kafka: str, prefix: str, database: str, folder: Path, **environment: str
) -> AsyncIterator[tuple[Caller, Recorder, Deployment]]:
    """A deployment on running servers, with its gateway and a recorder of all services."""
    first_port = choose_port(0)
    options = Options(
        data_dir=folder / "deployment",
        kafka=kafka,
        postgres=database,
        prefix=prefix,
        gateway_port=0,
        start_timeout_s=300.0,
        environment={METRICS_PORT: str(first_port), "PENSTOCK_CALLBACK_SECRETS": SECRET, **environment},
    )
    async with Deployment(options) as deployment, aiohttp.ClientSession() as session:
        caller = Caller(deployment.gateway_url, session)
        await wait_until(caller.is_ready)
        ports = {name: first_port + number for number, name in enumerate(SERVICES)}
        yield caller, Recorder(ports), deployment


def total(recorder: Recorder, name: str, **labels: str) -> float:
    """The sum of the last values of a metric, of the series with these labels."""
    return sum(
        float(value)
        for found, value in recorder.last(name).items()
        if labels.items() <= dict(found).items() and value not in ("stale", "_")
    )


@pytest.mark.long
async def test_lost_leases_are_alerted(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> None:
    """O4: the alert fires when a worker vanishes with its tasks, although the series of the type
    begins with these losses."""
    tasks = 12
    async with recorded(kafka_servers, prefix, database, tmp_path) as (gateway, recorder, _deployment):
        assert (await gateway.post("/types", {"name": "t", "partitions": 1, "lease_ms": 2_000})).status == 201
        batch = [{"type": "t"} for _ in range(tasks)]
        assert (await gateway.post("/tasks", batch)).status == 201
        held: set[int] = set()

        async def holds_all() -> bool:
            answer = await gateway.post("/hold_task", {"worker": "w", "type": "t", "max": tasks, "wait_s": 5})
            held.update(task["id"] for task in answer.body["tasks"])
            return len(held) == tasks

        await wait_until(holds_all)
        await recorder.step()
        assert firing(recorder, tmp_path, "PenstockLeasesLost") == set()

        # The worker is silent from here on.
        async def all_lost() -> bool:
            await recorder.step()
            return total(recorder, "penstock_leases_lost_total", type="t") >= tasks

        await wait_until(all_lost, every=1.0, what="every lease expires")
        recorder.hold(2)
        assert firing(recorder, tmp_path, "PenstockLeasesLost") == {""}


@pytest.mark.long
@pytest.mark.parametrize("away", ["postgres", "kafka"])
async def test_a_server_that_is_away_is_alerted(tmp_path: Path, away: str) -> None:
    """O4, S11: the alert fires for every service while a server is away, and not before."""
    folder = make_folder()
    supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    try:
        servers = {
            "kafka": EmbeddedKafka(supervisor, folder / "kafka"),
            "postgres": EmbeddedPostgres(supervisor, folder / "postgres"),
        }
        await asyncio.gather(*(server.start(timeout_s=300.0) for server in servers.values()))
        first_port = choose_port(0)
        options = Options(
            data_dir=folder / "deployment",
            kafka=servers["kafka"].servers,  # type: ignore[attr-defined]
            postgres=servers["postgres"].tcp_dsn(),  # type: ignore[attr-defined]
            gateway_port=0,
            start_timeout_s=300.0,
            environment={
                METRICS_PORT: str(first_port),
                "PENSTOCK_SESSION_TIMEOUT_S": "6",
                "PENSTOCK_CALLBACK_SECRETS": SECRET,
            },
        )
        async with Deployment(options):
            recorder = Recorder({name: first_port + number for number, name in enumerate(SERVICES)})

            async def all_well() -> bool:
                await recorder.step()
                checks = recorder.last("penstock_check_ok")
                return len(checks) > len(SERVICES) and set(checks.values()) == {"1.0"}

            await wait_until(all_well, every=1.0, what="every check succeeds")
            assert firing(recorder, tmp_path, "PenstockServerUnavailable") == set()
            await servers[away].stop()

            async def all_failing() -> bool:
                await recorder.step()
                checks = recorder.last("penstock_check_ok")
                failing = {dict(labels)["job"] for labels, value in checks.items() if value == "0.0"}
                # The owner of flows gives up its shards a moment after its check has failed.
                owned = total(recorder, "penstock_flow_shards")
                return len(failing) == len(SERVICES) and owned == (0 if away == "postgres" else SHARDS)

            await wait_until(all_failing, every=1.0, what="every service reports the outage")
            waiting = recorder.last("penstock_waiting_seconds")
            waits = {dict(labels)["server"] for labels, value in waiting.items() if float(value) > 0}
            assert away in waits, waiting
            assert {dict(labels)["job"] for labels in waiting} == {f"penstock-{name}" for name in SERVICES}
            recorder.hold(SOON)
            assert firing(recorder, tmp_path, "PenstockServerUnavailable") == set(SERVICES)
            recorder.hold(HELD - SOON)
            assert firing(recorder, tmp_path, "PenstockServerUnavailable") == set(SERVICES)
            unowned = firing(recorder, tmp_path, "PenstockFlowShardsUnowned")
            assert unowned == ({""} if away == "postgres" else set())
    finally:
        supervisor.close()
        shutil.rmtree(folder)


def firing_after(recorder: Recorder, folder: Path, steps: int) -> set[str]:
    """All alerts that fire when the last recorded step has lasted for so many more."""
    lasting = copy.deepcopy(recorder)
    lasting.hold(steps)
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    output = judged(lasting, folder, [rule["alert"] for rule in rules])
    return set(re.findall(r'alertname="(\w+)"', output))


@pytest.mark.long
async def test_other_outages_are_alerted_and_a_calm_hour_is_not(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> None:
    """O4, S11: no alert fires in a calm hour of a deployment. The object store is away, one service
    is frozen, and one that was killed does not come back: each is alerted in time."""
    async with recorded(kafka_servers, prefix, database, tmp_path) as (gateway, recorder, deployment):
        assert (await gateway.post("/types", {"name": "t", "partitions": 1})).status == 201

        async def all_well() -> bool:
            await recorder.step()
            checks = recorder.last("penstock_check_ok")
            now = {labels: value for labels, value in checks.items() if value not in ("stale", "_")}
            return len({dict(labels)["job"] for labels in now}) == len(SERVICES) and set(now.values()) == {
                "1.0"
            }

        await wait_until(all_well, every=1.0, what="every check succeeds")
        assert firing_after(recorder, tmp_path, HOUR) == set()

        objects = tmp_path / "deployment" / "objects"
        away = objects.with_name("objects-away")
        objects.rename(away)
        objects.write_text("a file where the folder was")

        async def waits_for_objects() -> bool:
            await recorder.step()
            return total(recorder, "penstock_waiting_seconds", server="objects") > 0

        await wait_until(waits_for_objects, every=1.0, what="a service waits for the object store")
        found = firing_after(recorder, tmp_path, SOON)
        assert found == {"PenstockServerUnavailable", "PenstockWaiting"}
        objects.unlink()
        away.rename(objects)
        await wait_until(all_well, every=1.0, what="every check succeeds again")

        deployment.kill("stages")
        # Its supervisor starts it again a moment later; here it stays away.
        await recorder.step()
        assert firing_after(recorder, tmp_path, SOON) == {"PenstockServiceMissing"}
        assert firing_after(recorder, tmp_path, HELD) >= {"PenstockServiceMissing", "PenstockProcessDown"}
        await wait_until(all_well, every=1.0, what="the service is back")

        with frozen(deployment.processes["heartbeats"]):
            await recorder.step()
            assert firing_after(recorder, tmp_path, SOON) == {"PenstockServiceMissing"}
            assert firing_after(recorder, tmp_path, HELD) >= {"PenstockServiceMissing", "PenstockProcessDown"}
