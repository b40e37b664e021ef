"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.settings import Metered, Platform, option


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(Platform, Metered):
    """See `Platform` and `Metered` for what it shares with others."""

    gateway_host: str = option(
        "127.0.0.1", "Address the gateway listens on; 0.0.0.0 opens it to the network."
    )
    gateway_port: int = option(8420, "Port the gateway listens on; 0 takes any that is free.")
    gateway_body_limit_bytes: int = option(8 * 1024 * 1024, "Longest request body.")
    gateway_batch_limit: int = option(1_000, "Most tasks or results in one request.")
    gateway_connections: int = option(6, "Most PostgreSQL connections of one gateway.")
    gateway_buffer: int = option(1_000, "Most tasks of one type fetched ahead for HTTP workers.")
    gateway_queue_bytes: int = option(
        64 * 1024 * 1024,
        "Most bytes of HTTP workers' reports and beats on their way to Kafka; what comes beyond is answered 429. "
        "Tasks are handed out while it is less than half.",
    )
    gateway_submit_rows: int = option(
        50_000, "Most submitted tasks that wait for PostgreSQL; what comes beyond is answered 429."
    )
    gateway_submit_bytes: int = option(64 * 1024 * 1024, "The same in bytes of requests.")
    gateway_submit_wait_s: float = option(
        5.0,
        "Seconds that the oldest submission may wait for PostgreSQL before new ones are answered 429.",
    )
    gateway_linger_s: float = option(
        30.0, "Seconds without a request of an HTTP worker after which its type's partitions are given back."
    )
    gateway_give_back_s: float = option(
        1.0,
        "The same while tasks wait in them and the type has other workers or gateways with some; up to eight times as long "
        "for a gateway whose workers come back each time.",
    )

    def validate(self) -> list[str]:
        """A batch must fit what one statement and one buffer take."""
        problems = super().validate()
        if not 0 <= self.gateway_port <= 65_535:
            problems.append(f"gateway_port={self.gateway_port} must be from 0 to 65535")
        if not 1 <= self.gateway_batch_limit <= 10_000:
            problems.append(f"gateway_batch_limit={self.gateway_batch_limit} must be from 1 to 10000")
        if self.gateway_body_limit_bytes < 1_000_000:
            problems.append(
                f"gateway_body_limit_bytes={self.gateway_body_limit_bytes} must be at least 1000000: "
                "a single context may be 900000 bytes"
            )
        if self.gateway_queue_bytes < self.gateway_body_limit_bytes:
            problems.append(
                f"gateway_queue_bytes={self.gateway_queue_bytes} must be at least "
                f"gateway_body_limit_bytes={self.gateway_body_limit_bytes}"
            )
        if self.gateway_submit_rows < self.gateway_batch_limit:
            problems.append(
                f"gateway_submit_rows={self.gateway_submit_rows} must be at least "
                f"gateway_batch_limit={self.gateway_batch_limit}"
            )
        if self.gateway_submit_bytes < self.gateway_body_limit_bytes or self.gateway_submit_wait_s <= 0:
            problems.append(
                f"gateway_submit_bytes={self.gateway_submit_bytes} must be at least "
                f"gateway_body_limit_bytes={self.gateway_body_limit_bytes}, "
                f"gateway_submit_wait_s={self.gateway_submit_wait_s} above 0"
            )
        if self.gateway_connections < 2:
            problems.append(f"gateway_connections={self.gateway_connections} must be at least 2")
        if self.gateway_give_back_s <= 0:
            problems.append(f"gateway_give_back_s={self.gateway_give_back_s} must be above 0")
        if self.gateway_buffer < 1 or self.gateway_linger_s <= 0:
            problems.append(
                f"gateway_buffer={self.gateway_buffer} and gateway_linger_s={self.gateway_linger_s} "
                "must be above 0"
            )
        return problems
