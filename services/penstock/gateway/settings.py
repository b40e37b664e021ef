"""Settings of the gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.access import Role
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

    gateway_auth: str = option(
        "off",
        "Who may ask: off (anybody; only on a loopback address), keys (API keys: `penstock keys`), oidc (bearer tokens of "
        "an OpenID Connect provider) or keys,oidc.",
    )
    gateway_key_rate: float = option(
        500.0, "Most requests a second of one API key or token subject with one gateway; 0 is no limit."
    )
    gateway_audit_days: int = option(90, "Days after which rows of the audit of requests are removed.")
    oidc_issuer: str = option("", "URL of the OpenID Connect provider, as its tokens have it in `iss`.")
    oidc_audience: str = option("", "What tokens must have in `aud`.")
    oidc_role_claim: str = option(
        "penstock_roles", "Claim with the roles of a token; dots lead into objects (realm_access.roles)."
    )
    oidc_namespace_claim: str = option(
        "penstock_namespaces", "Claim with the namespaces of a token; `*` is all of them."
    )
    oidc_roles: tuple[str, ...] = option(
        (), "What the provider calls our roles: comma-separated NAME=ROLE. Empty: as we do."
    )

    @property
    def auth_kinds(self) -> frozenset[str]:
        """The ways to prove who one is; none where nobody is asked."""
        kinds = frozenset(word.strip() for word in self.gateway_auth.split(","))
        return frozenset() if kinds == {"off"} else kinds

    @property
    def oidc_role_names(self) -> dict[str, str]:
        """Our roles by the provider's names for them; empty when they are ours."""
        return {name: role for name, _, role in (pair.rpartition("=") for pair in self.oidc_roles)}

    def validate(self) -> list[str]:
        """A batch must fit what one statement and one buffer take; what others can reach asks who they are."""
        problems = super().validate() + self._of_auth()
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

    def _of_auth(self) -> list[str]:
        kinds = self.auth_kinds
        problems = []
        if not kinds <= {"keys", "oidc"}:
            problems.append(f"gateway_auth={self.gateway_auth!r} must be off, keys, oidc or keys,oidc")
        elif not kinds and not _is_loopback(self.gateway_host):
            problems.append(
                f"gateway_host={self.gateway_host} can be reached from outside this machine, and "
                "gateway_auth=off lets anybody in who does: set PENSTOCK_GATEWAY_AUTH=keys and make a key with "
                "`penstock keys create NAME --role ROLE`, or listen on PENSTOCK_GATEWAY_HOST=127.0.0.1"
            )
        if "oidc" in kinds and not (self.oidc_issuer and self.oidc_audience):
            problems.append(
                "gateway_auth has oidc: set PENSTOCK_OIDC_ISSUER and PENSTOCK_OIDC_AUDIENCE, "
                f"which are {self.oidc_issuer!r} and {self.oidc_audience!r}"
            )
        if "oidc" in kinds and self.oidc_issuer and not _is_trusted(self.oidc_issuer):
            problems.append(
                f"oidc_issuer={self.oidc_issuer!r} must be an https:// URL: whoever stands between could name keys of his own"
            )
        problems += [
            f"oidc_roles has {pair!r}, which is not NAME=ROLE with one of {', '.join(Role)}"
            for pair in self.oidc_roles
            if not pair.rpartition("=")[0] or pair.rpartition("=")[2] not in frozenset(Role)
        ]
        if self.gateway_key_rate < 0 or not 1 <= self.gateway_audit_days <= 36_500:
            problems.append(
                f"gateway_key_rate={self.gateway_key_rate} must not be negative, "
                f"gateway_audit_days={self.gateway_audit_days} must be from 1 to 36500"
            )
        return problems


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there; in doubt not."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_trusted(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or ""))
