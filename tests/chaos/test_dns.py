"""No name is resolved any more, and the servers then have other addresses.

Each process reaches Kafka, PostgreSQL, the gateway and the targets of callbacks by names.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.local.broker import EmbeddedKafka, Node
from penstock.local.deployment import SERVICES
from penstock.local.ports import choose_port
from penstock.local.supervisor import Supervisor
from tests.chaos.names import DOMAIN, LOOPBACK, missing, named
from tests.chaos.outage_wave import LEASE_MS, OutageScenario, metered, nothing_charged, wave_through
from tests.chaos.scenario import run_scenario
from tests.support.callback_targets import target_server
from tests.support.postgres_servers import PostgresServer


@dataclass(frozen=True)
class Servers:
    """Servers on loopback.

    Attributes:
        kafka: bootstrap servers by address.
        named_kafka: the same broker, which names itself to clients of this listener.
        postgres: URL by address.
        named_postgres: URL by name.
    """

    kafka: str
    named_kafka: str
    postgres: str
    named_postgres: str

    @property
    def ports(self) -> list[int]:
        """The ports to which names lead."""
        return [int(self.named_kafka.rpartition(":")[2]), urlsplit(self.named_postgres).port or 0]


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[Servers]:
    """A broker with a listener that advertises a name, and a database."""
    log = (folder / "servers.log").open("w", encoding="utf-8", buffering=1)
    supervisor = Supervisor(lambda name, line: print(name, line, file=log), run_dir=folder / "run")
    port, named_port, controller = choose_port(), choose_port(), choose_port()
    broker = EmbeddedKafka(
        supervisor,
        folder / "kafka",
        port=port,
        node=Node(
            controllers={1: controller},
            properties={
                "listeners": f"PLAINTEXT://{LOOPBACK}:{port},NAMED://{LOOPBACK}:{named_port},CONTROLLER://{LOOPBACK}:{controller}",
                "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port},NAMED://kafka.{DOMAIN}:{named_port}",
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,NAMED:PLAINTEXT",
            },
        ),
    )
    database = PostgresServer(folder / "postgres")
    try:
        database.make()
        await asyncio.gather(broker.start(), database.start(max_connections="200"))
        assert broker.port == port
        yield Servers(
            broker.servers,
            f"kafka.{DOMAIN}:{named_port}",
            database.url(),
            database.url(host=f"postgres.{DOMAIN}"),
        )
    finally:
        database.kill()
        await asyncio.to_thread(supervisor.close)
        log.close()


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_names_that_are_not_resolved_are_charged_to_no_attempt(tmp_path):
    """S11, T4, O2: no name is resolved while tasks run, and connections break, or processes start.
    Every service reports Kafka and PostgreSQL, none ends, and all find the servers at their new
    addresses. Every task succeeds, without a failure or a loss."""
    gateway_port = choose_port()
    async with target_server() as target, servers(tmp_path) as there:
        target_port = urlsplit(target.url).port or 0
        hosts = ("kafka", "postgres", "gateway", "target")
        async with named(tmp_path / "names", hosts, [*there.ports, gateway_port, target_port]) as names:
            environment = {
                **metered(),
                "PENSTOCK_CALLBACK_ALLOW": "127.0.0.0/8",
                "PENSTOCK_ALLOWED_HOSTS": f"*.{DOMAIN}",
            }
            by_name = (
                *names.prefix,
                *("env", f"PENSTOCK_KAFKA={there.named_kafka}", f"PENSTOCK_POSTGRES={there.named_postgres}"),
            )
            services = {
                name: replace(service, argv=(*by_name, *service.argv)) for name, service in SERVICES.items()
            }
            async with run_scenario(
                tmp_path,
                "names",
                workers=0,
                environment=environment,
                services=services,
                lease_ms=LEASE_MS,
                postgres=there.postgres,
                kafka=there.kafka,
                gateway_port=gateway_port,
                kind=OutageScenario,
            ) as scenario:
                scenario.targets = [f"http://target.{DOMAIN}:{target_port}/{number}" for number in range(5)]
                scenario.workers.start(prefix=by_name)
                scenario.workers.start(
                    prefix=names.prefix,
                    environment={"PENSTOCK_WORKER_GATEWAY": f"http://gateway.{DOMAIN}:{gateway_port}"},
                )

                @asynccontextmanager
                async def connections_break() -> AsyncIterator[None]:
                    await names.vanish()
                    yield
                    await names.appear()

                @asynccontextmanager
                async def processes_start() -> AsyncIterator[None]:
                    # A killed gateway forgets the answers that their worker has not received, and
                    # those tasks wait for leases of minutes. A gateway that stops delivers them.
                    await scenario.restart("gateway", signal.SIGTERM)
                    async with connections_break():
                        for service in SERVICES.keys() - {"gateway"}:
                            await scenario.restart(service, signal.SIGKILL)
                        yield

                reports = dict.fromkeys(SERVICES, frozenset({"kafka", "postgres"}))
                for outage, ends in ((connections_break, 0), (processes_start, 1)):
                    async with nothing_charged(scenario, target):
                        await wave_through(
                            scenario, f"no names, {ends} starts", outage, reports, ended=frozenset({ends})
                        )
