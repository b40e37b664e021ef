"""One trace from submission to callback, on the real Kafka and PostgreSQL, received as a collector receives it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.callback_targets import LOOPBACK, SECRET, Target
from tests.gateways import Caller, running_gateway
from tests.running import make_topics, running_service
from tests.waiting import wait_until

from penstock import tracing
from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.settings import Kafka
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Next, Worker, WorkerSettings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENDER = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{'5' * 32}-00f067aa0ba902b7-00"


class Collector:
    """Receives OTLP by HTTP, on a thread of its own."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    for attribute in resource.resource.attributes:
                        if attribute.key == "service.name":
                            outer.services.add(attribute.value.string_value)
                    for scope in resource.scope_spans:
                        outer.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector, and this process tracing to it: OpenTelemetry has one provider a process, once and for all."""
    made = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        tracing.configure("test")
    yield made
    tracing.shutdown()
    made.close()


class Deployment:
    """All services and a worker of two stages, of which the first has a span of its own."""

    def __init__(self, kafka: Kafka, gateway: Caller, target: Target) -> None:
        self.kafka = kafka
        self.gateway = gateway
        self.target = target

    async def called(self, task_id: int) -> dict[str, str]:
        """The headers of the callback of a task, once it came."""

        def headers() -> dict[str, str] | None:
            found = [call for call in self.target.calls if call.id.startswith(f"msg_{task_id}-")]
            return {name.lower(): value for name, value in found[0].headers.items()} if found else None

        return await wait_until(headers)


@pytest.fixture
async def deployment(
    kafka_servers: str, prefix: str, database: str, tmp_path: Any, target: Target
) -> AsyncIterator[Deployment]:
    kafka = await make_topics(kafka_servers, prefix)
    where: dict[str, Any] = {"kafka": kafka.kafka, "prefix": kafka.prefix}
    objects = f"file://{tmp_path}"
    worker = Worker(WorkerSettings(**where, objects=objects))

    @worker.stage("t.start")
    async def start(_task: Any) -> Any:
        with trace.get_tracer("user").start_as_current_span("theirs"):
            return Next("finish")

    @worker.stage("t.finish")
    def finish(_task: Any) -> Any:
        # On a thread of its own.
        trace.get_tracer("user").start_span("theirs too").end()
        return Done()

    apps = [
        task_sync.create_app(TaskSyncSettings(**where, postgres=database, objects=objects)),
        heartbeats.create_app(HeartbeatsSettings(**where, postgres=database)),
        stages.create_app(StagesSettings(**where, postgres=database)),
        callbacks.create_app(
            CallbacksSettings.load(
                {}, **where, postgres=database, callback_secrets=(SECRET,), callback_allow=LOOPBACK
            )
        ),
    ]
    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(running_service(app))
        gateway = await stack.enter_async_context(
            running_gateway(**where, postgres=database, objects=objects)
        )
        await gateway.post("/types", {"name": "t", "callbacks": [target.url]})
        await stack.enter_async_context(running_service(worker.serve))
        yield Deployment(kafka, gateway, target)


def arrived(collector: Collector, trace_id: str, names: list[str]) -> Callable[[], bool]:
    return lambda: sorted(span.name for span in collector.of(trace_id)) == sorted(names)


ONE_TASK = ["submit", "callback", *["release", "attempt", "complete"] * 2, "theirs", "theirs too"]


async def test_one_trace_leads_from_submission_to_callback(
    collector: Collector, deployment: Deployment
) -> None:
    """Issue 7: the sender's trace goes on through gateway, task-sync, both attempts, their commits and the callback, with the
    handler's own spans under their attempts; the target is given the span of its call. What is not sampled leaves nothing."""
    gateway = deployment.gateway
    submitted = await gateway.post("/tasks", {"type": "t"}, headers={"traceparent": SENDER})
    quiet = await gateway.post("/tasks", {"type": "t"}, headers={"traceparent": UNSAMPLED})
    headers = await deployment.called(submitted.body["id"])
    await wait_until(arrived(collector, TRACE, ONE_TASK))
    spans = {span.span_id.hex(): span for span in collector.of(TRACE)}
    by_name: dict[str, list[Any]] = {}
    for span in spans.values():
        by_name.setdefault(span.name, []).append(span)

    def parent(name: str) -> set[str]:
        return {
            spans[span.parent_span_id.hex()].name if span.parent_span_id.hex() in spans else "the sender's"
            for span in by_name[name]
        }

    assert parent("submit") == {"the sender's"}
    assert by_name["submit"][0].parent_span_id.hex() == SENDER.split("-")[2]
    assert parent("release") == parent("complete") == parent("callback") == {"submit"}
    assert parent("attempt") == {"release"}
    assert parent("theirs") == parent("theirs too") == {"attempt"}
    assert headers["traceparent"] == f"00-{TRACE}-{by_name['callback'][0].span_id.hex()}-01"
    said = {a.key: a.value for a in by_name["callback"][0].attributes}
    assert said["penstock.task.id"].int_value == submitted.body["id"]
    assert said["penstock.status"].int_value == 200
    assert "penstock-test" in collector.services

    assert "traceparent" not in await deployment.called(quiet.body["id"])
    assert collector.of("5" * 32) == []


async def test_a_record_on_submitted_goes_on_with_its_trace(
    collector: Collector, deployment: Deployment
) -> None:
    """Issue 7: the context comes in a header of the record; one that nobody can read begins a trace of its own."""
    trace_id = "7" * 32
    records = [f"00-{trace_id}-{'1' * 16}-01".encode(), b"\xff not a context"]
    producer = AIOKafkaProducer(bootstrap_servers=deployment.kafka.kafka)
    await producer.start()
    try:
        for value in records:
            await producer.send_and_wait(
                f"{deployment.kafka.prefix}submitted", b'{"type":"t"}', headers=[("traceparent", value)]
            )
    finally:
        await producer.stop()
    await wait_until(arrived(collector, trace_id, ONE_TASK))
    [submit] = [span for span in collector.of(trace_id) if span.name == "submit"]
    assert submit.parent_span_id.hex() == "1" * 16

    def called() -> set[str] | None:
        calls = deployment.target.calls
        found = {call.headers["traceparent"].split("-")[1] for call in calls if "traceparent" in call.headers}
        return found if len(found) == 2 else None

    assert trace_id in await wait_until(called)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


async def test_the_sampler_of_the_environment_decides() -> None:
    """Issue 7: OTEL_TRACES_SAMPLER is honoured: of 400 submissions a quarter is traced, and of none of the others anything."""
    received = Collector()
    try:
        told = await asyncio.to_thread(
            run,
            "from penstock import tracing\n"
            "tracing.configure('gateway')\n"
            "spans = [tracing.begin('submit', None, root=True) for _ in range(400)]\n"
            "later = [tracing.begin('release', span.traceparent) for span in spans if span]\n"
            "for span in spans + later:\n"
            "    if span: span.end()\n"
            "tracing.shutdown()\n"
            "print(sum(span is not None for span in spans), sum(span is not None for span in later))\n",
            OTEL_EXPORTER_OTLP_ENDPOINT=received.url,
            OTEL_TRACES_SAMPLER="parentbased_traceidratio",
            OTEL_TRACES_SAMPLER_ARG="0.25",
        )
        sampled, later = map(int, told.split())
        # Nine standard deviations.
        assert 22 < sampled < 178
        assert later == sampled
        assert len(received.spans) == 2 * sampled
        assert received.services == {"penstock-gateway"}
    finally:
        received.close()


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_nothing_is_imported_unless_it_is_asked_for(environment: dict[str, str]) -> None:
    """Issue 7: without an endpoint there is no OpenTelemetry in the process, and every question is answered None."""
    run(
        "import sys\n"
        "from penstock import tracing\n"
        "tracing.configure('gateway')\n"
        "assert not tracing.is_on() and tracing.current_trace_id() is None\n"
        f"assert tracing.begin('submit', {SENDER!r}, root=True) is None\n"
        "with tracing.span('submit', None, root=True) as span: assert span is None\n"
        "tracing.shutdown()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n",
        **environment,
    )


def test_what_is_not_installed_is_said_and_costs_no_start() -> None:
    """An endpoint named for a whole cluster must not keep a service from starting: it says what is missing and goes on."""
    told = run(
        "import sys, logging\n"
        "sys.modules['opentelemetry'] = None\n"
        "from penstock import tracing\n"
        "logging.basicConfig()\n"
        "tracing.configure('gateway')\n"
        "assert not tracing.is_on()\n",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert "no traces: opentelemetry is not installed: pip install 'penstock[otel]'" in told


def test_logs_name_their_trace() -> None:
    """Issue 7: an entry of JSON that is logged inside a span has its trace id."""
    told = run(
        "import logging\n"
        "from penstock import logs, tracing\n"
        "logs.configure('worker', tracing.current_trace_id)\n"
        "tracing.configure('worker')\n"
        f"with tracing.span('attempt', {SENDER!r}): logging.getLogger('x').warning('inside')\n"
        "logging.getLogger('x').warning('outside')\n"
        "import os; os._exit(0)\n",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
        PENSTOCK_LOG_FORMAT="json",
    )
    inside, outside = told.splitlines()
    assert f'"trace_id":"{TRACE}"' in inside
    assert "trace_id" not in outside
