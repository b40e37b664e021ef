"""Alerts fire on the series of real outages: processes are scraped while a server is away."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.deployment import METRICS_PORT, SERVICES, Deployment, Options
from penstock.local.ports import choose_port
from penstock.local.supervisor import Supervisor
from penstock.postgres.flows import SHARDS
from tests.support.callback_targets import SECRET
from tests.support.gateways import Caller
from tests.support.memory_folder import make_folder
from tests.support.recorded_series import STEP_S, Recorder
from tests.support.waiting import wait_until

RULES = Path(__file__).parents[2] / "infra" / "observability" / "alerts.yml"
# Steps that an outage is continued with, so that alerts with `for` fire.
HELD = 40


def firing(recorder: Recorder, folder: Path, alert: str) -> set[str]:
    """The jobs for which an alert fires at the end of the recorded series, or "" without a job."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing: it is in Debian's package prometheus")
    at_s = (recorder.steps - 1) * STEP_S
    case: dict[str, Any] = {
        "interval": f"{STEP_S}s",
        "input_series": recorder.input_series(),
        "alert_rule_test": [{"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []}],
    }
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{STEP_S}s", "tests": [case]}
    (folder / "case.json").write_text(json.dumps(document))
    done = subprocess.run(
        [tool, "test", "rules", "case.json"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return set()
    got = done.stdout.rpartition("got:")[2] + done.stderr.rpartition("got:")[2]
    assert f'alertname="{alert}"' in got, done.stdout + done.stderr
    return {name for name in SERVICES if f'job="penstock-{name}"' in got} or {""}


@asynccontextmanager
async def recorded(
    kafka: str, prefix: str, database: str, folder: Path, **environment: str
) -> AsyncIterator[tuple[Caller, Recorder]]:
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
        yield caller, Recorder({name: first_port + number for number, name in enumerate(SERVICES)})


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
    async with recorded(kafka_servers, prefix, database, tmp_path) as (gateway, recorder):
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
            recorder.hold(HELD)
            assert firing(recorder, tmp_path, "PenstockServerUnavailable") == set(SERVICES)
            unowned = firing(recorder, tmp_path, "PenstockFlowShardsUnowned")
            assert unowned == ({""} if away == "postgres" else set())
    finally:
        supervisor.close()
        shutil.rmtree(folder)
