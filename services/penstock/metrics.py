"""Metrics: every name and what it means, and the page from which Prometheus reads them.

What a service counts are plain numbers of its own, read when somebody asks: counting costs the hot path an addition,
and nothing is kept here. The page is served by the service's own loop, so that a loop which stands still is seen.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from penstock.errors import CannotStart
from penstock.settings import Metered

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metric:
    """What is measured.

    Attributes:
        name: as Prometheus shows it; counters end in _total.
        doc: what it is, with its unit.
        labels: names of its labels.
        buckets: upper bounds of a histogram's buckets but the last; none for others.
    """

    name: str
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """The type: counter, gauge or histogram."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


CALLBACK_TAKEN = Metric("penstock_callback_taken_total", "Records of callbacks taken in, by path.", ("path",))
CALLBACK_CALLS = Metric(
    "penstock_callback_calls_total",
    "Calls that have ended, by path and by what comes of them: delivered, retried or dead.",
    ("path", "outcome"),
)
CALLBACK_SLOW = Metric(
    "penstock_callback_slow_calls_total",
    "Calls that took longer than PENSTOCK_CALLBACK_SLOW_S, by path.",
    ("path",),
)
CALLBACK_SECONDS = Metric(
    "penstock_callback_call_seconds",
    "Seconds from connecting to the end of the answer, by path.",
    ("path",),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
)
CALLBACK_HELD = Metric(
    "penstock_callback_held_total", "Callbacks held, because their target is abnormal or disabled."
)
CALLBACK_GRANTED = Metric(
    "penstock_callback_granted_total", "Held callbacks let go, as probes or to drain what is held."
)
CALLBACK_SLOTS = Metric(
    "penstock_callback_slots", "Most calls under way in a pool: normal, diverted or slow.", ("pool",)
)
CALLBACK_SLOTS_USED = Metric("penstock_callback_slots_used", "Calls under way in a pool.", ("pool",))
CALLBACK_WAITING = Metric(
    "penstock_callback_waiting", "Callbacks in hand that wait for their target's turn, by path.", ("path",)
)
CALLBACK_TARGETS = Metric(
    "penstock_callback_targets",
    "Targets that this process judges, by state: normal, abnormal or disabled.",
    ("state",),
)
CALLBACK_SUSPICION = Metric(
    "penstock_callback_suspicion",
    "1 while this process suspects itself of slowness, and charges nothing to targets; else 0.",
)

WINDOW_SIZE = Metric(
    "penstock_window_size",
    "Most records that may wait on a type's ready topic, and what that goes by: floor, drain, hunger, ceiling or rate.",
    ("type", "reason"),
)
WINDOW_LAG = Metric(
    "penstock_window_lag",
    "Records on a type's ready topic that no worker had taken when it was last looked.",
    ("type",),
)
WINDOW_DRAIN = Metric(
    "penstock_window_drain",
    "Attempts of a type that end each second, as of when its window last held tasks back.",
    ("type",),
)
RELEASED = Metric(
    "penstock_released_total", "Tasks that this process has brought to ready topics, by type.", ("type",)
)
LIMIT = Metric(
    "penstock_limit",
    "What a type may have, by limit: in_flight (tasks; what there are is told by penstock_backlog), starts_per_s (attempts a second; what "
    "start is told by penstock_released_total) or per_key (tasks in flight of one key).",
    ("type", "limit"),
)
PAUSED = Metric("penstock_type_paused", "1 while a type is paused, else 0.", ("type",))
BACKLOG = Metric(
    "penstock_backlog",
    "Tasks of a type, stage and priority in a state: ready, scheduled, paused, waiting or in_flight (queued or running).",
    ("type", "stage", "priority", "state"),
)
BACKLOG_OLDEST = Metric(
    "penstock_backlog_oldest_seconds",
    "For how long the first ready task of a type, stage and priority has been ready.",
    ("type", "stage", "priority"),
)

HISTORY_MOVED = Metric("penstock_history_moved_total", "Tasks that this process has moved to history.")
HISTORY_ARCHIVED = Metric(
    "penstock_history_archived_total",
    "Tasks that this process has archived, in objects that were found whole.",
)
HISTORY_ARCHIVED_BYTES = Metric("penstock_history_archived_bytes_total", "Bytes of these objects.")
HISTORY_DROPPED = Metric(
    "penstock_history_dropped_total", "Partitions of history that this process has dropped."
)

SUBMIT_WAITING = Metric(
    "penstock_submit_waiting", "Tasks that were submitted to this gateway and are not answered yet."
)
SUBMIT_OLDEST = Metric(
    "penstock_submit_oldest_seconds", "Seconds for which the oldest of them has been waiting; 0 when none is."
)
SUBMIT_REFUSED = Metric(
    "penstock_submit_refused_total",
    "Submissions answered 429 because PostgreSQL is behind, by what that goes by: late, rows or bytes.",
    ("why",),
)
INGEST_WAITING = Metric(
    "penstock_ingest_waiting",
    "Records of the topic submitted that were read by this process and are not in PostgreSQL yet.",
)
INGEST_PAUSED = Metric(
    "penstock_ingest_paused",
    "Partitions of the topic submitted that this process does not read on, because PostgreSQL is behind.",
)
INGEST_TAKEN = Metric(
    "penstock_ingest_taken_total",
    "Records of the topic submitted that this process has brought to PostgreSQL or rejected.",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Sample:
    """A number as it is now.

    Attributes:
        metric: what it measures.
        value: the number; of a histogram the sum of what it has seen.
        labels: values, in the order of the metric's names.
        counts: of a histogram: how many it has seen in each bucket, the unbounded one last.
    """

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    counts: Sequence[int] = ()


# Asked whenever the page is.
Source = Callable[[], Iterable[Sample]]


class _Sampled(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Family]:
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._source():
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric, samples in by_metric.items():
            yield _family(metric, samples)


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for sample in samples:
            histogram.add_metric(sample.labels, _cumulated(metric, sample.counts), sample.value)
        return histogram
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.name, metric.doc, labels=metric.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _cumulated(metric: Metric, counts: Iterable[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        found.append((bound, total))
    return found


@asynccontextmanager
async def serving(settings: Metered, source: Source) -> AsyncIterator[None]:
    """Serves the page at /metrics for as long as the block runs, unless the port is 0.

    Raises:
        CannotStart: nothing can listen there.
    """
    if not settings.metrics_port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_Sampled(source))

    async def page(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, settings.metrics_host, settings.metrics_port).start()
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.metrics_host}:{settings.metrics_port} ({error.strerror}): "
                "set PENSTOCK_METRICS_PORT to a free port, or to 0 for no metrics"
            ) from error
        log.info("metrics at http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)
        yield
    finally:
        await runner.cleanup()
