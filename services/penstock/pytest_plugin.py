"""The pytest plugin: fixtures for tests of pipelines. pytest finds it by itself.

It imports nothing of Penstock before a test asks for a fixture, because pytest loads it in every
run of every project that has the package.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.local.deployment import Options
    from penstock.testing import Deployment, Pipeline


@pytest.fixture
def penstock_pipeline() -> Iterator[Callable[..., Pipeline]]:
    """Makes pipelines in memory, which close with the test.

        async def test_order(penstock_pipeline):
            pipeline = penstock_pipeline(worker)

    The arguments are those of `penstock.testing.Pipeline`.
    """
    from penstock.testing import Pipeline  # noqa: PLC0415 (see the module)

    made: list[Pipeline] = []

    def make(worker: Any, **options: Any) -> Pipeline:
        made.append(Pipeline(worker, **options))
        return made[-1]

    yield make
    for pipeline in reversed(made):
        pipeline.close_with_loop()


@pytest.fixture(scope="session")
def penstock_deployment_options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The options of the deployment that tests use; a project may replace this fixture."""
    from penstock.local.deployment import Options  # noqa: PLC0415 (see the module)

    return Options(
        data_dir=tmp_path_factory.mktemp("penstock"), gateway_port=0, kafka_port=0, postgres_port=0
    )


@pytest.fixture(scope="session")
def penstock_environment(penstock_deployment_options: Options) -> Iterator[Mapping[str, str]]:
    """The variables that lead to a real deployment, which all tests of a run share."""
    deployment = _RunningDeployment(penstock_deployment_options)
    try:
        yield deployment.started.result()
    finally:
        deployment.stop()


@pytest.fixture
def penstock_deployment(penstock_environment: Mapping[str, str]) -> Callable[..., Deployment]:
    """Makes workers on the real deployment.

        async def test_order(penstock_deployment):
            async with penstock_deployment(worker) as deployment: ...

    The first test that uses it starts Kafka, PostgreSQL and all services. The arguments are those
    of `penstock.testing.Deployment`, without the environment.
    """
    from penstock.testing import Deployment  # noqa: PLC0415 (see the module)

    return lambda worker, **options: Deployment(worker, penstock_environment, **options)


class _RunningDeployment:
    """A deployment in a thread of its own, which outlives the event loops of tests."""

    def __init__(self, options: Options) -> None:
        self.started: Future[Mapping[str, str]] = Future()
        self._options = options
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="penstock deployment")
        self._thread.start()

    def stop(self) -> None:
        """Stops all parts."""
        self._stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (the fixture raises it)
            if not self.started.done():
                self.started.set_exception(error)

    async def _serve(self) -> None:
        from penstock.local.deployment import Deployment  # noqa: PLC0415 (see the module)

        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stopping.set)
        async with Deployment(self._options) as deployment:
            self.started.set_result(deployment.environment)
            await stopping.wait()
