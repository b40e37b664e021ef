"""The page that Prometheus scrapes, without prometheus_client: workers install light.

It has the text format 0.0.4, which every scraper reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import penstock
from penstock.concurrency.outages import waiting_s
from penstock.metrics import BUILD_INFO, CHECK_OK, LOGGED, WAITING_SECONDS, Metric, Sample, Source
from penstock.metrics.log_counter import LogCounter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Named as by prometheus_client.
CPU_SECONDS = Metric(
    "process_cpu_seconds_total", "Total user and system CPU time that this process has used, in seconds."
)
START_TIME = Metric("process_start_time_seconds", "When this process started, in seconds since 1970.")
RESIDENT_MEMORY = Metric("process_resident_memory_bytes", "Resident memory of this process, in bytes.")

_STARTED_S = time.time()
_STATM = Path("/proc/self/statm")


class TextPage:
    """The metrics page of one process; see `MetricsPage`.

    Args:
        service: the name of its service.
        source: returns the service's samples; called for each scrape.
    """

    def __init__(self, service: str, source: Source) -> None:
        self.service = service
        self.logged = LogCounter()
        self.checks: Mapping[str, bool] = {}
        self._source = source

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, which does not depend on what a client accepts."""
        del accept
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._samples():
            by_metric.setdefault(sample.metric, []).append(sample)
        lines = [line for metric, samples in by_metric.items() for line in _lines(metric, samples)]
        return "".join(f"{line}\n" for line in lines).encode(), CONTENT_TYPE

    def _samples(self) -> Iterator[Sample]:
        yield Sample(BUILD_INFO, 1, (self.service, penstock.__version__))
        yield Sample(LOGGED, self.logged.warnings, ("warning",))
        yield Sample(LOGGED, self.logged.errors, ("error",))
        for check, succeeds in self.checks.items():
            yield Sample(CHECK_OK, succeeds, (check,))
        for server, seconds in waiting_s().items():
            yield Sample(WAITING_SECONDS, seconds, (server,))
        yield from self._source()
        yield Sample(CPU_SECONDS, time.process_time())
        yield Sample(START_TIME, _STARTED_S)
        if _STATM.exists():
            # In pages of 4 KiB, as resource.getpagesize() says on all systems with this file.
            yield Sample(RESIDENT_MEMORY, int(_STATM.read_text().split()[1]) * _page_size())


def _page_size() -> int:
    import resource  # noqa: PLC0415 (not on all systems)

    return resource.getpagesize()


def _lines(metric: Metric, samples: Iterable[Sample]) -> Iterator[str]:
    assert metric.kind != "histogram", "this page has no histograms"
    doc = metric.doc.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {metric.name} {doc}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for sample in samples:
        labels = ",".join(
            f'{name}="{_escaped(value)}"' for name, value in zip(metric.labels, sample.labels, strict=True)
        )
        yield (
            f"{metric.name}{{{labels}}} {float(sample.value)}"
            if labels
            else f"{metric.name} {float(sample.value)}"
        )


def _escaped(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return escaped.encode("utf-8", "backslashreplace").decode()
