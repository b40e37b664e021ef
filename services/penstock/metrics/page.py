"""The page that Prometheus scrapes: a service's samples and the `process_*` metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import penstock
from penstock.concurrency.outages import waiting_s
from penstock.metrics import BUILD_INFO, CHECK_OK, LOGGED, WAITING_SECONDS, Metric, Sample, Source
from penstock.metrics.log_counter import LogCounter
from penstock.metrics.rounds import ROUNDS


class Page:
    """The metrics page of one process.

    Args:
        service: the name of its service.
        source: returns the service's samples; called for each scrape.

    Attributes:
        service: the name of its service.
        logged: the log handler that counts warnings and errors for the page.
        checks: whether each check of /readyz succeeds, as of this scrape.
    """

    def __init__(self, service: str, source: Source) -> None:
        self.service = service
        self._source = source
        self.logged = LogCounter()
        self.checks: Mapping[str, bool] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_SampleCollector(self._samples))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the page in the format that an Accept header requests, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _samples(self) -> Iterator[Sample]:
        yield Sample(BUILD_INFO, 1, (self.service, penstock.__version__))
        yield Sample(LOGGED, self.logged.warnings, ("warning",))
        yield Sample(LOGGED, self.logged.errors, ("error",))
        for check, succeeds in self.checks.items():
            yield Sample(CHECK_OK, succeeds, (check,))
        for server, seconds in waiting_s().items():
            yield Sample(WAITING_SECONDS, seconds, (server,))
        yield from ROUNDS.samples()
        yield from self._source()


class _SampleCollector(Collector):
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
            histogram.add_metric(sample.labels, _cumulative(metric, sample.counts), sample.value)
        return histogram
    family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = family_type(metric.name, metric.doc, labels=metric.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _cumulative(metric: Metric, counts: Iterable[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    total = 0
    cumulative: list[tuple[str, float]] = []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        cumulative.append((bound, total))
    return cumulative
