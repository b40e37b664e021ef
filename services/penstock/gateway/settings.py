"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.access import Role
from penstock.core.hosts import is_loopback
from penstock.http.connection_guard import ConnectionLimits
from penstock.settings import Metered, Platform, Reporting, Sealing, option, port_faults, secret

# Bodies of the largest size that may be in memory at once.
_BODIES = 16

_BOUNDS = (
    ("gateway_batch_limit", 1, 10_000),
    ("gateway_clients", 1, 1_000_000),
    ("gateway_type_partitions", 1, 1_000),
    ("gateway_audit_days", 1, 36_500),
)
_LEAST = {
    # A single context may be 900,000 bytes.
    "gateway_body_limit_bytes": 1_000_000,
    "gateway_connections": 2,
    "gateway_read_connections": 2,
    "gateway_address_clients": 1,
    "gateway_namespace_types": 1,
    "gateway_buffer": 1,
    "gateway_key_rate": 0,
}
_ABOVE_0 = ("gateway_submit_wait_s", "gateway_give_back_s", "gateway_linger_s")
_AT_LEAST = (
    ("gateway_queue_bytes", "gateway_body_limit_bytes"),
    ("gateway_submit_bytes", "gateway_body_limit_bytes"),
    ("gateway_submit_rows", "gateway_batch_limit"),
    ("gateway_clients", "gateway_address_clients"),
)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(Platform, Metered, Sealing, Reporting):
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
    oidc_client_id: str = option(
        "", "Client id at the provider for sign-in to the console; empty is no sign-in by the provider."
    )
    oidc_client_secret: str = secret("Secret of that client; empty for a public client, which PKCE protects.")
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
        problems = super().validate() + self._auth_problems()
        problems += port_faults("gateway_port", self.gateway_port)
        problems += self._bound_problems(_LEAST, _ABOVE_0, _BOUNDS)
        problems += [
            f"{larger}={getattr(self, larger)} must be at least {smaller}={getattr(self, smaller)}"
            for larger, smaller in _AT_LEAST
            if getattr(self, larger) < getattr(self, smaller)
        ]
        return problems

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
        return problems


def _is_trusted(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
