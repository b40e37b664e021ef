"""One trace from submission to callback, on the real Kafka and PostgreSQL, received by an OTLP
collector."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.callback_targets import LOOPBACK, SECRET, Target
from tests.support.gateways import Caller, running_gateway
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock import tracing
from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.flow_owner import app as flow_owner
from penstock.flow_owner.settings import FlowsSettings
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
    """Receives OTLP over HTTP, on a thread of its own."""

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
                """Discards the log line."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans_of(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector that receives the traces of this process. OpenTelemetry has one provider in a
    process, hence the scope."""
    made = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        tracing.configure("test")
    yield made
    tracing.shutdown()
    made.close()


class Deployment:
    """All services, and a worker with two stages of two types, each stage with a span of its own.

    Each stage of type `t` has a release. The worker goes on with tasks of type `free`.
    """

    def __init__(self, kafka: Kafka, gateway: Caller, target: Target) -> None:
        self.kafka = kafka
        self.gateway = gateway
        self.target = target

    async def callback_headers(self, subject: int | str) -> dict[str, str]:
        """The headers of a callback, once it has arrived: of a task's id, or of `flow-ID`."""

        def headers() -> dict[str, str] | None:
            found = [call for call in self.target.calls if call.id.startswith(f"msg_{subject}-")]
            return {name.lower(): value for name, value in found[0].headers.items()} if found else None

        return await wait_until(headers)


@pytest.fixture
async def deployment(
    kafka_servers: str, prefix: str, database: str, tmp_path: Any, target: Target
) -> AsyncIterator[Deployment]:
    kafka = await make_topics(kafka_servers, prefix)
    kafka_settings: dict[str, Any] = {"kafka": kafka.kafka, "prefix": kafka.prefix}
    objects = f"file://{tmp_path}"
    worker = Worker(WorkerSettings(**kafka_settings, objects=objects))

    for name in ("t", "free"):

        @worker.stage(f"{name}.start")
        async def start(_task: Any) -> Any:
            with trace.get_tracer("user").start_as_current_span("user span"):
                return Next("finish")

        @worker.stage(f"{name}.finish")
        def finish(_task: Any) -> Any:
            # A plain function runs on a thread of its own.
            trace.get_tracer("user").start_span("user thread span").end()
            return Done()

    apps = [
        task_sync.create_app(TaskSyncSettings(**kafka_settings, postgres=database, objects=objects)),
        flow_owner.create_app(
            FlowsSettings(**kafka_settings, postgres=database, objects=objects, flow_own_retry_s=0.2)
        ),
        heartbeats.create_app(HeartbeatsSettings(**kafka_settings, postgres=database)),
        stages.create_app(StagesSettings(**kafka_settings, postgres=database)),
        callbacks.create_app(
            CallbacksSettings.load(
                {}, **kafka_settings, postgres=database, callback_secrets=(SECRET,), callback_allow=LOOPBACK
            )
        ),
    ]
    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(running_service(app))
        gateway = await stack.enter_async_context(
            running_gateway(**kafka_settings, postgres=database, objects=objects)
        )
        await gateway.post("/types", {"name": "t", "callbacks": [target.url], "max_in_flight": 100})
        await gateway.post("/types", {"name": "free", "callbacks": [target.url]})
        await stack.enter_async_context(running_service(worker.serve))
        yield Deployment(kafka, gateway, target)


def arrived(collector: Collector, trace_id: str, names: list[str]) -> Callable[[], bool]:
    return lambda: sorted(span.name for span in collector.spans_of(trace_id)) == sorted(names)


ONE_TASK = ["submit", "callback", *["release", "attempt", "complete"] * 2, "user span", "user thread span"]


async def test_one_trace_contains_submission_and_callback(
    collector: Collector, deployment: Deployment
) -> None:
    """O4: the sender's trace contains the gateway, task-sync, both attempts, their commits and
    the callback. The handler's spans are below their attempts, and the target receives the span of
    its call. A trace that is not sampled has no spans."""
    gateway = deployment.gateway
    submitted = await gateway.post("/tasks", {"type": "t"}, headers={"traceparent": SENDER})
    unsampled = await gateway.post("/tasks", {"type": "t"}, headers={"traceparent": UNSAMPLED})
    headers = await deployment.callback_headers(submitted.body["id"])
    await wait_until(arrived(collector, TRACE, ONE_TASK))
    spans = {span.span_id.hex(): span for span in collector.spans_of(TRACE)}
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
    assert parent("user span") == parent("user thread span") == {"attempt"}
    assert headers["traceparent"] == f"00-{TRACE}-{by_name['callback'][0].span_id.hex()}-01"
    attributes = {a.key: a.value for a in by_name["callback"][0].attributes}
    assert attributes["penstock.task.id"].int_value == submitted.body["id"]
    assert attributes["penstock.status"].int_value == 200
    assert "penstock-test" in collector.services

    assert "traceparent" not in await deployment.callback_headers(unsampled.body["id"])
    assert collector.spans_of("5" * 32) == []


async def test_stages_with_which_a_worker_goes_on_are_in_the_trace(
    collector: Collector, deployment: Deployment
) -> None:
    """O4: such a task has one release, and both attempts are below it."""
    trace_id = "6" * 32
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    await deployment.gateway.post("/tasks", {"type": "free"}, headers=headers)
    names = [*ONE_TASK]
    names.remove("release")
    await wait_until(arrived(collector, trace_id, names))
    spans = collector.spans_of(trace_id)
    [release] = [span.span_id for span in spans if span.name == "release"]
    assert [span.parent_span_id for span in spans if span.name == "attempt"] == [release] * 2


async def test_a_submitted_record_continues_its_trace(collector: Collector, deployment: Deployment) -> None:
    """O4: a header of the record has the trace context. An unreadable context begins a new
    trace."""
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
    [submit] = [span for span in collector.spans_of(trace_id) if span.name == "submit"]
    assert submit.parent_span_id.hex() == "1" * 16

    def callback_traces() -> set[str] | None:
        calls = deployment.target.calls
        found = {call.headers["traceparent"].split("-")[1] for call in calls if "traceparent" in call.headers}
        return found if len(found) == 2 else None

    assert trace_id in await wait_until(callback_traces)


async def test_one_trace_contains_a_flow_and_its_callback(
    collector: Collector, deployment: Deployment
) -> None:
    """O4, F4: the tasks of a flow, and of its child flow, belong to the trace of the start; the
    target of the flow receives its event with the span of the call."""
    gateway, trace_id = deployment.gateway, "8" * 32
    child = {"flow": "child", "version": 1, "nodes": {"work": {"kind": "task", "type": "t"}}}
    parent = {
        "flow": "parent",
        "version": 1,
        "nodes": {
            "first": {"kind": "task", "type": "t"},
            "sub": {"kind": "flow", "flow": "child", "after": ["first"]},
        },
    }
    for definition in (child, parent):
        await gateway.post("/flow-definitions", definition)
    start = {"flow": "parent", "callbacks": [deployment.target.url]}
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    flow_id = (await gateway.post("/flows", start, headers=headers)).body["id"]
    called = await deployment.callback_headers(f"flow-{flow_id}")

    def names() -> Counter[str]:
        return Counter(span.name for span in collector.spans_of(trace_id))

    # Two tasks of two stages. The type has a callback of its own for each.
    expected = {"submit": 1, "release": 4, "attempt": 4, "complete": 4, "user span": 2, "callback": 3}
    await wait_until(lambda: expected.items() <= names().items(), what=f"{expected}: {names()}")
    spans = {span.span_id.hex(): span for span in collector.spans_of(trace_id)}
    [submit] = [span for span in spans.values() if span.name == "submit"]
    assert submit.parent_span_id.hex() == "1" * 16
    for span in spans.values():
        if span.name in ("release", "complete", "callback"):
            assert spans[span.parent_span_id.hex()] is submit
    assert spans[called["traceparent"].split("-")[2]].name == "callback"


def run_python(code: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


async def test_the_sampler_of_the_environment_is_used() -> None:
    """O4: tracing obeys OTEL_TRACES_SAMPLER. A quarter of 400 submissions is traced, and the
    others have no spans."""
    received = Collector()
    try:
        output = await asyncio.to_thread(
            run_python,
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
        sampled, later = map(int, output.split())
        # The bounds are nine standard deviations from the mean.
        assert 22 < sampled < 178
        assert later == sampled
        assert len(received.spans) == 2 * sampled
        assert received.services == {"penstock-gateway"}
    finally:
        received.close()


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_opentelemetry_is_imported_only_for_an_endpoint(environment: dict[str, str]) -> None:
    """O4: without an endpoint the process does not import OpenTelemetry, and tracing functions
    return None."""
    run_python(
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


def test_a_service_starts_without_opentelemetry() -> None:
    """A service starts without OpenTelemetry although an endpoint is set for the whole cluster, and
    logs how to install it."""
    output = run_python(
        "import sys, logging\n"
        "sys.modules['opentelemetry'] = None\n"
        "from penstock import tracing\n"
        "logging.basicConfig()\n"
        "tracing.configure('gateway')\n"
        "assert not tracing.is_on()\n",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert "Traces are off because a module is missing: pip install 'penstock[otel]'" in output


def test_log_entries_have_their_trace_id() -> None:
    """O4: a JSON log entry inside a span has the trace id of the span."""
    output = run_python(
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
    inside, outside = output.splitlines()
    assert f'"trace_id":"{TRACE}"' in inside
    assert "trace_id" not in outside
