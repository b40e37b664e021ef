"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.settings import Kafka, option

# Attempts of one worker. Each costs it memory, and when it is lost all of them wait for their leases to run out.
MOST_IN_HAND = 100_000
# Beyond, the system refuses to start one more, in the middle of the work.
MOST_THREADS = 10_000


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Kafka):
    """See `Kafka` for what it shares with the services."""

    worker_gateway: str = option(
        "",
        "URL of a gateway: the worker then needs neither Kafka nor the object store, and speaks HTTP with it.",
    )
    # Never in a repr: settings end up in logs and tracebacks.
    api_key: str = field(
        default="",
        repr=False,
        metadata={"doc": "API key or bearer token that the worker sends to PENSTOCK_WORKER_GATEWAY."},
    )
    api_key_file: str = option(
        "",
        "File that holds the key instead; read again whenever the gateway refuses what it held, so that a key is rotated "
        "without a restart.",
    )
    refused_timeout_s: float = option(
        300.0,
        "Seconds for which a worker that the gateway does not let in goes on trying, before it ends with status 6.",
    )
    pool: int = option(2_000, "Most handlers that run at once; with the backlog at most 100,000.")
    backlog: int = option(1_000, "Most claimed tasks that wait for a handler.")
    threads: int = option(64, "Most synchronous handlers that run at once, each on a thread of its own.")
    timeout_s: float = option(600.0, "Seconds a handler may take unless its stage says otherwise.")
    drain_timeout_s: float = option(30.0, "Seconds running handlers are given to end when the worker stops.")

    def validate(self) -> list[str]:
        """There must be room for something."""
        problems = super().validate()
        problems += [
            f"{name}={getattr(self, name)} must be from {least} to {most}"
            for name, least, most in (
                ("pool", 1, MOST_IN_HAND),
                ("backlog", 0, MOST_IN_HAND),
                ("threads", 1, MOST_THREADS),
            )
            if not least <= getattr(self, name) <= most
        ]
        if self.pool + self.backlog > MOST_IN_HAND:
            problems.append(
                f"pool={self.pool} and backlog={self.backlog} must be at most {MOST_IN_HAND:,} together: "
                "run more workers instead"
            )
        url = urlsplit(self.worker_gateway)
        if self.worker_gateway and not (url.scheme in ("http", "https") and url.hostname):
            problems.append(f"worker_gateway={self.worker_gateway!r} is no http:// or https:// URL")
        if self.refused_timeout_s < 0:
            problems.append(f"refused_timeout_s={self.refused_timeout_s} must not be negative")
        if self.timeout_s <= 0 or self.drain_timeout_s < 0:
            problems.append(
                f"timeout_s={self.timeout_s} must be above 0, drain_timeout_s={self.drain_timeout_s} not negative"
            )
        return problems
