"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.settings import Kafka, option

# Attempts in flight of one worker. Each needs memory, and after a crash all of them wait until
# their leases expire.
MOST_IN_FLIGHT = 100_000
# Above this, operating systems refuse to start another thread.
MOST_THREADS = 10_000


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Kafka):
    """The settings of workers only; `Kafka` has the shared ones."""

    worker_gateway: str = option(
        "",
        "URL of a gateway. With it the worker uses HTTP and needs neither Kafka nor the object store.",
    )
    # Without repr, since logs and tracebacks contain settings.
    api_key: str = field(
        default="",
        repr=False,
        metadata={"doc": "API key or bearer token that the worker sends to PENSTOCK_WORKER_GATEWAY."},
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
    drain_timeout_s: float = option(
        30.0, "Seconds that running handlers get to finish when the worker stops."
    )

    def validate(self) -> list[str]:
        """The pool must have room for at least one handler."""
        problems = super().validate()
        problems += [
            f"{name}={getattr(self, name)} must be from {least} to {most}"
            for name, least, most in (
                ("pool", 1, MOST_IN_FLIGHT),
                ("backlog", 0, MOST_IN_FLIGHT),
                ("threads", 1, MOST_THREADS),
            )
            if not least <= getattr(self, name) <= most
        ]
        if self.pool + self.backlog > MOST_IN_FLIGHT:
            problems.append(
                f"pool={self.pool} and backlog={self.backlog} must be at most {MOST_IN_FLIGHT:,} together: "
                "run more workers instead"
            )
        url = urlsplit(self.worker_gateway)
        if self.worker_gateway and not (url.scheme in ("http", "https") and url.hostname):
            problems.append(f"worker_gateway={self.worker_gateway!r} is not an http:// or https:// URL")
        if self.refused_timeout_s < 0:
            problems.append(f"refused_timeout_s={self.refused_timeout_s} must not be negative")
        if self.timeout_s <= 0 or self.drain_timeout_s < 0:
            problems.append(
                f"timeout_s={self.timeout_s} must be above 0, drain_timeout_s={self.drain_timeout_s} not negative"
            )
        return problems
