"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.access import Role
from penstock.core.hosts import is_loopback
from penstock.http.connection_guard import ConnectionLimits
from penstock.settings import Metered, Platform, Sealing, option

# Bodies of the largest size that may be in memory at once.
_BODIES = 16


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(Platform, Metered, Sealing):
    """The settings of the gateway only; the base classes have the shared ones."""

    gateway_host: str = option(
        "127.0.0.1", "Address that the gateway listens on; 0.0.0.0 opens it to the network."
    )
    gateway_port: int = option(8420, "Port that the gateway listens on; 0 chooses a free one.")
    gateway_body_limit_bytes: int = option(8 * 1024 * 1024, "Maximum size of a request body in bytes.")
    gateway_batch_limit: int = option(1_000, "Maximum number of tasks or results in one request.")
    gateway_clients: int = option(
        12_000,
        "Maximum number of open connections of clients. Beyond, the one that waits longest for its request is closed, or "
        "the new one refused (503) when all wait for answers.",
    )
    gateway_address_clients: int = option(
        11_000,
        "The same for one address (in IPv6 one /64 network), refused with 429. Raise it to PENSTOCK_GATEWAY_CLIENTS where all "
        "clients come through one proxy.",
    )
    gateway_connections: int = option(
        6, "Maximum number of PostgreSQL connections of one gateway for writes."
    )
    gateway_read_connections: int = option(
        3,
        "Maximum number of further PostgreSQL connections, for reads. Lists use all but one, and one for each API key or "
        "token subject.",
    )
    gateway_buffer: int = option(
        1_000, "Maximum number of tasks of one type that are prefetched for HTTP workers."
    )
    gateway_queue_bytes: int = option(
        64 * 1024 * 1024,
        "Maximum bytes of HTTP workers' results and heartbeats that wait for Kafka; beyond, requests are answered 429. "
        "/hold_task returns tasks only below half of it.",
    )
    gateway_submit_rows: int = option(
        50_000,
        "Maximum number of submitted tasks that wait for PostgreSQL; beyond, submissions are answered 429.",
    )
    gateway_submit_bytes: int = option(
        64 * 1024 * 1024,
        "Maximum bytes of submissions that wait for PostgreSQL; beyond, submissions are answered 429.",
    )
    gateway_submit_wait_s: float = option(
        5.0,
        "Seconds that the oldest submission may wait for PostgreSQL; beyond, submissions are answered 429.",
    )
    gateway_linger_s: float = option(
        30.0,
        "Seconds without a request for a type after which the gateway leaves the consumer group of that type.",
    )
    gateway_give_back_s: float = option(
        1.0,
        "Seconds without a request for a type with waiting tasks after which the gateway leaves its consumer group, when "
        "the group has other members. Doubles up to eightfold while workers return each time.",
    )
    gateway_namespace_types: int = option(
        500,
        "Maximum number of types of one namespace; a registration beyond is refused. Existing types stay.",
    )
    gateway_type_partitions: int = option(
        100, "Maximum number of partitions of a new type, from 1 to 1000. Existing types stay."
    )

    gateway_auth: str = option(
        "off",
        "Authentication of requests: keys (API keys, see `penstock keys`), oidc (bearer tokens of an OpenID Connect "
        "provider), keys,oidc, or off (allowed on a loopback address only).",
    )
    gateway_key_rate: float = option(
        500.0, "Maximum requests per second of one API key or token subject at one gateway; 0 is unlimited."
    )
    gateway_audit_days: int = option(90, "Days that rows of the request audit are kept.")
    oidc_issuer: str = option("", "URL of the OpenID Connect provider, equal to `iss` in its tokens.")
    oidc_audience: str = option("", "Audience that tokens must have in `aud`.")
    oidc_role_claim: str = option(
        "penstock_roles",
        "Claim that has the roles of a token; dots address nested objects (realm_access.roles).",
    )
    oidc_namespace_claim: str = option(
        "penstock_namespaces", "Claim that has the namespaces of a token; `*` is all namespaces."
    )
    oidc_roles: tuple[str, ...] = option(
        (),
        "Roles by the provider's names for them: NAME=ROLE, comma-separated. Empty when the names are equal.",
    )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits of connections of clients."""
        return ConnectionLimits(
            connections=self.gateway_clients,
            by_address=self.gateway_address_clients,
            body_bytes=_BODIES * self.gateway_body_limit_bytes,
        )

    @property
    def auth_kinds(self) -> frozenset[str]:
        """The accepted kinds of credentials; empty when authentication is off."""
        kinds = frozenset(word.strip() for word in self.gateway_auth.split(","))
        return frozenset() if kinds == {"off"} else kinds

    @property
    def oidc_role_names(self) -> dict[str, str]:
        """Roles by the provider's names for them; empty when the names are equal."""
        return {name: role for name, _, role in (pair.rpartition("=") for pair in self.oidc_roles)}

    def validate(self) -> list[str]:
        """Limits must fit together, and a gateway on the network must authenticate requests."""
        problems = (
            super().validate() + self._auth_problems() + self._type_problems() + self._client_problems()
        )
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
        if self.gateway_connections < 2 or self.gateway_read_connections < 2:
            problems.append(
                f"gateway_connections={self.gateway_connections} and "
                f"gateway_read_connections={self.gateway_read_connections} must be at least 2"
            )
        if self.gateway_give_back_s <= 0:
            problems.append(f"gateway_give_back_s={self.gateway_give_back_s} must be above 0")
        if self.gateway_buffer < 1 or self.gateway_linger_s <= 0:
            problems.append(
                f"gateway_buffer={self.gateway_buffer} and gateway_linger_s={self.gateway_linger_s} "
                "must be above 0"
            )
        return problems

    def _client_problems(self) -> list[str]:
        if 1 <= self.gateway_address_clients <= self.gateway_clients <= 1_000_000:
            return []
        problem = (
            f"gateway_clients={self.gateway_clients} must be from 1 to 1000000, and "
            f"gateway_address_clients={self.gateway_address_clients} from 1 to gateway_clients"
        )
        return [problem]

    def _type_problems(self) -> list[str]:
        if self.gateway_namespace_types >= 1 and 1 <= self.gateway_type_partitions <= 1_000:
            return []
        problem = (
            f"gateway_namespace_types={self.gateway_namespace_types} must be at least 1, "
            f"gateway_type_partitions={self.gateway_type_partitions} from 1 to 1000"
        )
        return [problem]

    def _auth_problems(self) -> list[str]:
        kinds = self.auth_kinds
        problems = []
        if not kinds <= {"keys", "oidc"}:
            problems.append(f"gateway_auth={self.gateway_auth!r} must be off, keys, oidc or keys,oidc")
        elif not kinds and not is_loopback(self.gateway_host):
            problems.append(
                f"gateway_host={self.gateway_host} can be reached from outside this machine, and "
                "gateway_auth=off accepts every request: set PENSTOCK_GATEWAY_AUTH=keys and create a key with "
                "`penstock keys create NAME --role ROLE`, or listen on PENSTOCK_GATEWAY_HOST=127.0.0.1"
            )
        if "oidc" in kinds and not (self.oidc_issuer and self.oidc_audience):
            problems.append(
                "gateway_auth has oidc: set PENSTOCK_OIDC_ISSUER and PENSTOCK_OIDC_AUDIENCE, "
                f"which are {self.oidc_issuer!r} and {self.oidc_audience!r}"
            )
        if "oidc" in kinds and self.oidc_issuer and not _is_trusted(self.oidc_issuer):
            problems.append(
                f"oidc_issuer={self.oidc_issuer!r} must be an https:// URL: on http:// an attacker on the network could replace the signing keys"
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


def _is_trusted(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
