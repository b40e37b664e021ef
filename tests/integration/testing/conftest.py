"""One suite, two platforms: in memory, and a real deployment.

A test takes `kit`, and makes pipelines by it. What passes in memory must pass on Kafka and
PostgreSQL, with all services: that is the promise of `penstock.testing`.
"""

import uuid

import pytest
from tests.support.shared_servers import database_dsn, execute, run
from tests.support.topics import FEW_PARTITIONS

from penstock.local.deployment import Options
from penstock.worker import Type, Worker


class Kit:
    """Makes pipelines of one platform.

    Names of types and definitions are unique to a test, because all tests share a deployment.
    """

    def __init__(self, make, *, is_real):
        self._make = make
        self.is_real = is_real
        self._suffix = uuid.uuid4().hex[:8]
        self.worker = Worker()

    def name(self, text):
        return f"{text}-{self._suffix}"

    def __call__(self, **options):
        return self._make(self.worker, **options)

    def declare(self, **settings):
        """Declares the type `order` in the code of the worker, before its stages."""
        self.worker = Worker(types=[Type(self.name("order"), **settings)])


@pytest.fixture(params=["memory", pytest.param("deployment", marks=pytest.mark.long)])
def kit(request):
    is_real = request.param == "deployment"
    make = request.getfixturevalue("penstock_deployment" if is_real else "penstock_pipeline")
    return Kit(make, is_real=is_real)


@pytest.fixture(scope="session")
def penstock_deployment_options(tmp_path_factory, kafka_servers, postgres_server):
    """A deployment on the servers that all tests share."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    run(execute(postgres_server, f"CREATE DATABASE {name}"))
    yield Options(
        data_dir=tmp_path_factory.mktemp("deployment"),
        kafka=kafka_servers,
        postgres=database_dsn(postgres_server, name),
        prefix=f"{name}.",
        gateway_port=0,
        environment={"PENSTOCK_TOPICS_FILE": str(FEW_PARTITIONS)},
    )
    run(execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)"))
