"""A prefix on Kafka belongs to one database; a service of another one refuses to start."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner
from tests.support.service_apps import app_of
from tests.support.services import make_topics, read, running_service, write
from tests.support.shared_servers import execute

from penstock.cli.main import cli
from penstock.errors import CannotStart
from penstock.gateway import app as gateway
from penstock.gateway.settings import GatewaySettings
from penstock.kafka.topology.binding import bind, database_of
from penstock.kafka.topology.services import SERVICES
from penstock.local.deployment import Deployment, Options
from penstock.postgres.deployment import read_deployment_id
from penstock.settings import Kafka

OTHER = "00000000-0000-4000-8000-000000000001"
SECRETS = ("whsec_" + "a" * 32,)


@pytest.fixture
async def settings(kafka_servers, prefix):
    return await make_topics(kafka_servers, prefix)


async def test_services_of_a_second_database_refuse_to_start(settings, database):
    """O5: the first service binds the prefix. With another database each service ends before it
    joins a group, and says which settings to change and which command to run."""
    where = {"kafka": settings.kafka, "prefix": settings.prefix, "postgres": database}
    async with running_service(app_of("stages", **where)):
        bound = await database_of(settings)
    assert bound == await read_deployment_id(database)
    await execute(database, f"UPDATE penstock.deployment SET id = '{OTHER}'")
    for name in SERVICES.keys() - {"gateway"}:
        with pytest.raises(CannotStart) as refused:
            async with running_service(app_of(name, **where)):
                pass
        for part in (bound, OTHER, settings.prefix, "PENSTOCK_PREFIX", "penstock topics bind --replace"):
            assert part in str(refused.value), name


async def test_a_gateway_of_a_second_database_ends(settings, database):
    """O5: it serves without Kafka, so it compares when it reaches Kafka; then it ends."""
    await bind(settings, OTHER)
    given = GatewaySettings(
        kafka=settings.kafka, prefix=settings.prefix, postgres=database, objects="memory:///", gateway_port=0
    )
    with pytest.raises(CannotStart, match="belongs to another database"):
        async with running_service(gateway.create_app(given)) as running:
            await running


async def test_two_databases_that_bind_at_once_agree(settings):
    """O5: of several that find the prefix unbound one gets it, and all learn which."""
    wanted = [f"00000000-0000-4000-8000-{n:012}" for n in range(5)]
    found = await asyncio.gather(*(bind(settings, database) for database in wanted))
    assert len(set(found)) == 1
    assert found[0] in wanted
    assert await bind(settings, wanted[0]) == found[0]


async def test_a_prefix_is_bound_again_on_purpose(settings, database):
    """O5: `penstock topics bind` shows the binding. With --replace it asks, then binds the prefix
    to this database; a record that is no binding changes nothing."""
    await bind(settings, OTHER)
    await write(settings.kafka, f"{settings.prefix}deployment", b"{}", {"database": OTHER, "replaces": False})
    own = await read_deployment_id(database)
    where = ["--kafka", settings.kafka, "--prefix", settings.prefix, "--postgres", database]

    async def verb(*arguments):
        return await asyncio.to_thread(CliRunner().invoke, cli, ["topics", "bind", *arguments, *where])

    shown = await verb()
    assert shown.exit_code == 8
    assert "belongs to another database" in shown.stdout
    refused = await verb("--replace")
    assert refused.exit_code == 2
    assert f"the services of the database {OTHER} would be refused" in refused.stderr
    assert await database_of(settings) == OTHER
    replaced = await verb("--replace", "--yes")
    assert replaced.exit_code == 0, replaced.output
    assert await database_of(settings) == own
    assert len(await read(settings.kafka, f"{settings.prefix}deployment")) == 4
    assert (await verb("--json")).exit_code == 0


async def test_a_missing_topic_is_told_and_accepted(kafka_servers, prefix):
    """O6: before an upgrade has created the topic, a service starts and warns."""
    assert await bind(Kafka(kafka=kafka_servers, prefix=prefix), OTHER) is None


async def test_up_refuses_a_prefix_of_another_database(settings, database, tmp_path):
    """O5: `penstock up --kafka … --postgres …` beside a deployment with the same prefix does not
    start a service."""
    await bind(settings, OTHER)
    options = Options(
        data_dir=tmp_path, kafka=settings.kafka, postgres=database, prefix=settings.prefix, gateway_port=0
    )
    deployment = Deployment(options)
    with pytest.raises(CannotStart, match="belongs to another database"):
        async with deployment:
            pass
    assert deployment.processes == {}
