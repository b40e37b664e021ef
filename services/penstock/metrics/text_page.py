"""The page that Prometheus scrapes: the samples of a process, and the metrics `process_*`.

It has the text format 0.0.4, which every scraper reads. Without prometheus_client, because workers
install light.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import penstock
from penstock.metrics import BUILD_INFO, CHECK_OK, LOGGED, Metric, Sample, Source
from penstock.metrics.log_counter import LogCounter
from penstock.metrics.rounds import ROUNDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Named as by prometheus_client.
CPU_SECONDS = Metric(
    "process_cpu_seconds_total", "Total user and system CPU time that this process has used, in seconds."
)
START_TIME = Metric("process_start_time_seconds", "When this process started, in seconds since 1970.")
RESIDENT_MEMORY = Metric("process_resident_memory_bytes", "Resident memory of this process, in bytes.")
VIRTUAL_MEMORY = Metric("process_virtual_memory_bytes", "Virtual memory of this process, in bytes.")
OPEN_FILES = Metric("process_open_fds", "Files and connections that this process has open.")
MOST_FILES = Metric("process_max_fds", "Files and connections that this process may have open.")

_STARTED_S = time.time()
_PROC = Path("/proc/self")


class TextPage:
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
        self.logged = LogCounter()
        self.checks: Mapping[str, bool] = {}
        self._source = source

    def render(self) -> bytes:
        """The page."""
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._samples():
            by_metric.setdefault(sample.metric, []).append(sample)
        lines = [line for metric, samples in by_metric.items() for line in _lines(metric, samples)]
        return "".join(f"{line}\n" for line in lines).encode()

    def _samples(self) -> Iterator[Sample]:
        yield Sample(BUILD_INFO, 1, (self.service, penstock.__version__))
        yield Sample(LOGGED, self.logged.warnings, ("warning",))
        yield Sample(LOGGED, self.logged.errors, ("error",))
        for check, succeeds in self.checks.items():
            yield Sample(CHECK_OK, succeeds, (check,))
        yield from ROUNDS.samples()
        yield from self._source()
        yield Sample(CPU_SECONDS, time.process_time())
        yield Sample(START_TIME, _STARTED_S)
        if _PROC.exists():
            virtual, resident, *_ = (_PROC / "statm").read_text().split()
            yield Sample(VIRTUAL_MEMORY, int(virtual) * resource.getpagesize())
            yield Sample(RESIDENT_MEMORY, int(resident) * resource.getpagesize())
            yield Sample(OPEN_FILES, sum(1 for _ in (_PROC / "fd").iterdir()))
            yield Sample(MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _lines(metric: Metric, samples: Sequence[Sample]) -> Iterator[str]:
    for name, doc in metric.exported:
        escaped = doc.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {escaped}"
        yield f"# TYPE {name} {metric.kind}"
        for sample in samples:
            labels = [*zip(metric.labels, sample.labels, strict=True)]
            if metric.kind == "histogram":
                bounds = [*map(str, metric.buckets), "+Inf"]
                for bound, total in zip(bounds, accumulate(sample.counts), strict=True):
                    yield _line(f"{name}_bucket", [*labels, ("le", bound)], total)
                yield _line(f"{name}_count", labels, sum(sample.counts))
                yield _line(f"{name}_sum", labels, sample.value)
            else:
                yield _line(name, labels, sample.value)


def _line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    selector = ",".join(f'{label}="{_escaped(of_sample)}"' for label, of_sample in labels)
    return f"{name}{{{selector}}} {float(value)}" if selector else f"{name} {float(value)}"


def _escaped(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return escaped.encode("utf-8", "backslashreplace").decode()
