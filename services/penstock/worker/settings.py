"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.settings import Kafka, MetricsPages, option, port_faults

# Attempts in flight of one worker. Each needs memory, and after a crash all of them wait until
# their leases expire.
MOST_IN_FLIGHT = 100_000
# Above this, operating systems refuse to start another thread.
MOST_THREADS = 10_000
TASK_LOGS_MODES = ("on", "only", "off")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Kafka, MetricsPages):
    """The settings of workers only; `Kafka` and `MetricsPages` have the shared ones."""

    worker_metrics_port: int = option(
        0, "Port of the worker's metrics server (/metrics, /livez, /readyz); 0 turns it off."
    )
    worker_gateway: str = option(
        "",
        "URL of a gateway. With it the worker uses HTTP and needs neither Kafka nor the object store.",
    )
    gateway: str = option(
        "",
        "URL of the gateway at which the worker registers the types of its code, unless PENSTOCK_WORKER_GATEWAY is set.",
    )
    # Without repr, since logs and tracebacks contain settings.
    api_key: str = field(
        default="",
        repr=False,
        metadata={"doc": "API key or bearer token that the worker sends to its gateway."},
    )
    api_key_file: str = option(
        "",
        "File with the API key or bearer token. The worker reads it again when the gateway refuses the credential, so that a "
        "rotation needs no restart.",
    )
    refused_timeout_s: float = option(
        300.0,
        "Seconds that a worker retries refused credentials before it exits with status 6.",
    )
    pool: int = option(2_000, "Maximum number of concurrent handlers; with PENSTOCK_BACKLOG at most 100,000.")
    backlog: int = option(
        1_000,
        "Maximum number of tasks that wait for a handler. A worker takes no more than it has ended within a quarter of a second.",
    )
    threads: int = option(
        64, "Maximum number of concurrent synchronous handlers, each of which has a thread."
    )
    timeout_s: float = option(
        600.0, "Seconds that a handler may run, unless its stage has a timeout of its own."
    )
    task_logs: str = option(
        "on",
        "Where the output of handlers goes: on is to the task's log and to the worker's own output, only is to the task's log alone, "
        "off is to the worker's output alone.",
    )
    drain_timeout_s: float = option(
        30.0, "Seconds that running handlers get to finish when the worker stops."
    )

    @property
    def metrics_port(self) -> int:
        """The port, by the name that the metrics server uses."""
        return self.worker_metrics_port

    def validate(self) -> list[str]:
        """The pool must have room for at least one handler."""
        problems = super().validate() + port_faults("worker_metrics_port", self.worker_metrics_port)
        problems += self._bound_problems(
            {"refused_timeout_s": 0, "drain_timeout_s": 0},
            ("timeout_s",),
            (("pool", 1, MOST_IN_FLIGHT), ("backlog", 0, MOST_IN_FLIGHT), ("threads", 1, MOST_THREADS)),
        )
        if self.pool + self.backlog > MOST_IN_FLIGHT:
            problems.append(
                f"pool={self.pool} and backlog={self.backlog} must be at most {MOST_IN_FLIGHT:,} together: "
                "run more workers instead"
            )
        if self.task_logs not in TASK_LOGS_MODES:
            problems.append(f"task_logs={self.task_logs!r} must be one of: {', '.join(TASK_LOGS_MODES)}")
        url = urlsplit(self.worker_gateway)
        if self.worker_gateway and not (url.scheme in ("http", "https") and url.hostname):
            problems.append(f"worker_gateway={self.worker_gateway!r} is not an http:// or https:// URL")
        return problems
