"""Settings: frozen dataclasses that are read from the environment and validated at start-up.

A service declares its own dataclass and inherits `Platform`. Each field `foo_bar` is read from
`PENSTOCK_FOO_BAR`. A keyword of `load` wins over the environment, and the environment over the
default. `validate` runs once, at start-up, and names the variable of every wrong field. The groups
of shared settings are one module: each is a few fields and their check.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_type_hints
from urllib.parse import parse_qs, quote

from penstock.core.connection_url import split_url
from penstock.core.hosts import hosts_fault
from penstock.discovery import local_environment
from penstock.errors import SettingsError
from penstock.kafka_security import KAFKA_MECHANISMS, KAFKA_PROTOCOLS, security_problems, unreadable
from penstock.variables import PREFIX, with_variables

ENVIRONMENT_PREFIX = PREFIX

# The largest value of any float setting: thirty years in seconds, which every timer accepts.
MOST = 1e9

# A host with an optional port; an IPv6 address stands in brackets.
_SERVER = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")

# Only the characters of RFC 3986.
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")

# What a header can carry.
_TOKEN = re.compile(r"[!-~]+")
_KEY_BYTES = 32

_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def option(default: Any, doc: str) -> Any:
    """A field with its description, which becomes docs/reference.md."""
    return field(default=default, metadata={"doc": doc})


def secret(doc: str) -> Any:
    """A field whose value `repr` hides, so that logs and tracebacks cannot show it."""
    return field(default="", repr=False, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base of all settings: loading and validation."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **overrides: Any) -> Self:
        """Reads `PENSTOCK_*` from `environ` (default: the process's), then applies `overrides`.

        Raises:
            SettingsError: a value cannot be parsed, or `validate` found a problem.
            TypeError: there is no such setting as one of the overrides.
        """
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        names = [item.name for item in dataclasses.fields(cls)]
        for unknown in overrides.keys() - set(names):
            nearest = get_close_matches(unknown, names, 1)
            hint = f": did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{cls.__name__} has no setting {unknown!r}{hint}")
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + item.name.upper()
            if overrides.get(item.name) is not None:
                values[item.name] = overrides[item.name]
            elif environ.get(variable, "") != "":
                values[item.name] = _parse(environ[variable], hints[item.name], variable)
        settings = cls(**values)
        # Alone, because comparisons with NaN in `validate` would give wrong answers.
        problems = settings._number_problems() or settings.validate()
        if problems:
            raise SettingsError(
                with_variables("; ".join(problems), [item.name for item in dataclasses.fields(cls)])
            )
        return settings

    def validate(self) -> list[str]:
        """Returns problems of fields and contradictions between them, one sentence each."""
        return []

    def _bound_problems(
        self,
        least: Mapping[str, float],
        above_0: Iterable[str] = (),
        ranges: Iterable[tuple[str, float, float]] = (),
    ) -> list[str]:
        """Problems of fields whose value is too small, or outside its bounds."""
        found = [(name, f"at least {bound}") for name, bound in least.items() if getattr(self, name) < bound]
        found += [(name, "above 0") for name in above_0 if getattr(self, name) <= 0]
        found += [
            (name, f"from {low} to {high}")
            for name, low, high in ranges
            if not low <= getattr(self, name) <= high
        ]
        return [f"{name}={getattr(self, name)} must be {bound}" for name, bound in found]

    def _number_problems(self) -> list[str]:
        values = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return [
            f"{ENVIRONMENT_PREFIX}{name.upper()}={value} must be a number, and at most {MOST:g}"
            for name, value in values
            # `not … <=` rather than `>`, so that NaN is a problem too.
            if isinstance(value, float) and not abs(value) <= MOST
        ]


def _parse(text: str, kind: Any, variable: str) -> Any:
    try:
        if kind is bool:
            return _BOOLEANS[text.strip().lower()]
        if kind in (int, float):
            return kind(text)
        if kind == tuple[str, ...]:
            return tuple(part.strip() for part in text.split(",") if part.strip())
    except (KeyError, ValueError) as error:
        raise SettingsError(f"{variable}={text!r} is not of type {kind.__name__}") from error
    return text


def port_faults(name: str, port: int) -> list[str]:
    """Why a setting is no port, or 0 for none."""
    return [] if 0 <= port <= 65_535 else [f"{name}={port} must be from 0 to 65535"]


@dataclass(frozen=True, kw_only=True)
class MetricsPages(Settings):
    """How a process serves its metrics.

    Services and workers have different settings of the port, because they often share variables.
    """

    metrics_host: str = option(
        "127.0.0.1", "Address that the metrics server listens on; 0.0.0.0 opens it to the network."
    )
    metrics_token: str = secret(
        "Token that /metrics needs as `Authorization: Bearer …`; empty opens it to every client. Probes need none."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Further host names by which clients call this process, comma-separated; `*.` and a name allows all below it. Names "
        "of loopback are always allowed, and every IP address where the server listens beyond loopback.",
    )

    def validate(self) -> list[str]:
        """The token must be printable, and hosts must be names."""
        problems = super().validate()
        if fault := hosts_fault(self.allowed_hosts):
            problems.append(f"allowed_hosts: {fault}")
        if self.metrics_token and not _TOKEN.fullmatch(self.metrics_token):
            problems.append("metrics_token must be printable ASCII characters without spaces")
        return problems


@dataclass(frozen=True, kw_only=True)
class Metered(MetricsPages):
    """The address of a service's metrics."""

    metrics_port: int = option(0, "Port of the metrics server (/metrics, /livez, /readyz); 0 turns it off.")

    def validate(self) -> list[str]:
        """The port must be from 0 to 65535."""
        return super().validate() + port_faults("metrics_port", self.metrics_port)


@dataclass(frozen=True, kw_only=True)
class Sweeping(Settings):
    """When the sweeper of an outbox publishes what its writer has left."""

    sweep_every_s: float = option(
        15.0,
        "Seconds between sweeps for events and results of callbacks that their writer has not published.",
    )
    sweep_age_s: float = option(
        10.0, "Seconds after which the sweeper publishes an unpublished event or result of a callback."
    )

    def validate(self) -> list[str]:
        """The sweeper must not publish records whose transaction has just committed."""
        problems = super().validate()
        if self.sweep_age_s < 1 or self.sweep_every_s <= 0:
            problems.append(
                f"sweep_age_s={self.sweep_age_s} must be at least 1 and sweep_every_s={self.sweep_every_s} above 0"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class Sealing(Settings):
    """The keys that encrypt stored secrets."""

    # Without repr, since logs and tracebacks contain settings.
    encryption_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "doc": "Keys that encrypt the secrets of callbacks in PostgreSQL, comma-separated, each the base64 of 32 random "
            "bytes; the same for gateway and callbacks. The first encrypts, all decrypt."
        },
    )

    def validate(self) -> list[str]:
        """Each key must have the 32 bytes of AES-256."""
        return super().validate() + [
            f"encryption_keys: number {number} is not the base64 of {_KEY_BYTES} bytes"
            for number, key in enumerate(self.encryption_keys, 1)
            if not _is_key(key)
        ]


@dataclass(frozen=True, kw_only=True)
class Reporting(Settings):
    """The keys of the tokens that reports on Kafka repeat."""

    # Without repr, since logs and tracebacks contain settings.
    report_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "doc": "Keys of the tokens that reports of workers on Kafka repeat, comma-separated, each the base64 of 32 random "
            "bytes; the same for gateway, task-sync, heartbeats, stages and tasklogs. The first makes tokens, all check "
            "them. Without keys, every report counts that names its attempt."
        },
    )

    def validate(self) -> list[str]:
        """A short key could be guessed from tokens."""
        return super().validate() + [
            f"report_keys: number {number} is not the base64 of {_KEY_BYTES} bytes"
            for number, key in enumerate(self.report_keys, 1)
            if not _is_key(key)
        ]


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except ValueError:
        return False


# Settings that name a deployment.
ADDRESSES = ("kafka", "postgres", "prefix", "objects")


@dataclass(frozen=True, kw_only=True)
class Kafka(Settings):
    """The Kafka cluster and the object store: the settings that workers and services share."""

    kafka: str = option("127.0.0.1:9092", "Bootstrap servers of Kafka: host:port, comma-separated.")
    prefix: str = option("penstock.", "Prefix of the names of all topics and consumer groups.")
    objects: str = option(
        "",
        "URL of the object store for large contexts, file:/// or s3://, the same for all processes. Workers, gateway and "
        "task-sync require it.",
    )
    session_timeout_s: float = option(
        7.0, "Seconds without a heartbeat after which Kafka removes a consumer from its group."
    )

    # Authentication to Kafka; `kafka/client/security.py` gives it to the client library.
    kafka_protocol: str = option(
        "PLAINTEXT", f"Security protocol of the brokers' listener: {', '.join(KAFKA_PROTOCOLS)}."
    )
    kafka_ca_file: str = option(
        "", "PEM file of the certificate authorities of the brokers; empty uses those of the system."
    )
    kafka_cert_file: str = option(
        "", "PEM file of this process's certificate, with its intermediate certificates."
    )
    kafka_key_file: str = option("", "PEM file of that certificate's private key, without a passphrase.")
    kafka_mechanism: str = option(
        "", f"SASL mechanism: {', '.join(KAFKA_MECHANISMS)}. Required with a SASL protocol."
    )
    kafka_user: str = option("", "User name for PLAIN and SCRAM.")
    kafka_password_file: str = option("", "File with the password of this user.")
    kafka_password: str = secret(
        "Password of this user. A file is safer, since many tools show the environment."
    )
    kafka_token_url: str = option(
        "", "https URL that issues tokens for OAUTHBEARER by client credentials (RFC 6749, 4.4)."
    )
    kafka_client_id: str = option("", "Client id for this token URL.")
    kafka_client_secret_file: str = option("", "File with the secret of this client.")
    kafka_scope: str = option("", "Scopes to request with a token, separated by spaces; empty requests none.")
    topics_file: str = option(
        "", "TOML file that declares the topics, in place of the packaged schemas/topics.toml."
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **overrides: Any) -> Self:
        """Like `Settings.load`, but completes the environment with a local deployment.

        When neither the environment nor `overrides` has any address or the prefix, the addresses
        are those of the deployment that `penstock up` runs in PENSTOCK_DATA_DIR or `.penstock`. It
        takes all addresses or none: a mix of two deployments would lose records.
        """
        if environ is None:
            environ = os.environ
            configured = any(
                overrides.get(name) or environ.get(ENVIRONMENT_PREFIX + name.upper()) for name in ADDRESSES
            )
            environ = environ if configured else {**environ, **local_environment()}
        return super().load(environ, **overrides)

    def validate(self) -> list[str]:
        """The session timeout must be from 6 s to 30 min; security settings must agree."""
        problems = super().validate()
        if not 6 <= self.session_timeout_s <= 1800:
            problems.append(
                f"session_timeout_s={self.session_timeout_s} must be from 6 to 1800, the bounds of the broker"
            )
        if not self.kafka:
            problems.append("kafka='' is empty: give host:port, for instance 127.0.0.1:9092")
        problems += [
            f"kafka={self.kafka!r}: {server.strip()!r} is not host:port"
            for server in self.kafka.split(",")
            if self.kafka and not _SERVER.fullmatch(server.strip())
        ]
        problems += security_problems(vars(self))
        if self.topics_file:
            problems += unreadable("topics_file", self.topics_file)
        return problems


@dataclass(frozen=True, kw_only=True)
class Progressing(Kafka):
    """Stall detection: a process with work and without progress exits (O2a)."""

    stall_timeout_s: float = option(
        60.0, "Seconds with work but without progress after which the process exits."
    )

    def validate(self) -> list[str]:
        """A rebalance takes up to one session timeout and must not count as a stall."""
        problems = super().validate()
        if self.stall_timeout_s < 2 * self.session_timeout_s:
            problems.append(
                f"stall_timeout_s={self.stall_timeout_s} must be at least twice "
                f"session_timeout_s={self.session_timeout_s}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class Platform(Kafka):
    """Kafka and PostgreSQL: the settings that all services share."""

    postgres: str = option("postgresql://postgres@127.0.0.1:5432/postgres", "PostgreSQL connection URL.")
    event_source: str = option(
        "/penstock",
        "`source` of callbacks in CloudEvents format: a URI reference that identifies this deployment.",
    )

    # PostgreSQL behind a connection pooler, and its password.
    postgres_session: str = option(
        "",
        "Direct URL of the same database, for locks, notifications and migrations, when PENSTOCK_POSTGRES is a pooler in "
        "transaction mode. Empty when there is no pooler.",
    )
    postgres_password_file: str = option(
        "", "File with the PostgreSQL password, read at start-up and added to URLs without a password."
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **overrides: Any) -> Self:
        """Like `Kafka.load`, but adds the password of `postgres_password_file` to the URLs.

        An override of `postgres` alone also clears `postgres_session`: a session in another
        database than the pool's would hold the wrong locks.

        Raises:
            SettingsError: also when the password file cannot be read.
        """
        if overrides.get("postgres") and not overrides.get("postgres_session"):
            environ = {**(os.environ if environ is None else environ), "PENSTOCK_POSTGRES_SESSION": ""}
        settings = super().load(environ, **overrides)
        if not settings.postgres_password_file:
            return settings
        password = _password(settings.postgres_password_file)
        return dataclasses.replace(
            settings,
            postgres=with_password(settings.postgres, password),
            postgres_session=settings.postgres_session and with_password(settings.postgres_session, password),
        )

    @property
    def pooled(self) -> bool:
        """Whether `postgres` is a pooler in transaction mode, which keeps no session state."""
        return bool(self.postgres_session)

    @property
    def sessions(self) -> str:
        """The URL for connections that need a session."""
        return self.postgres_session or self.postgres

    def validate(self) -> list[str]:
        """The event source must be a URI reference, or targets would reject every event."""
        problems = super().validate()
        if not _URI_REFERENCE.fullmatch(self.event_source):
            problems.append(
                f"event_source={self.event_source!r} is not a URI reference, such as /penstock or https://shop.example/tasks"
            )
        return problems


def _password(file: str) -> str:
    try:
        password = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"PENSTOCK_POSTGRES_PASSWORD_FILE={file!r} cannot be read: {error}") from error
    if not password:
        raise SettingsError(f"PENSTOCK_POSTGRES_PASSWORD_FILE={file!r} is empty")
    return password


def with_password(url: str, password: str) -> str:
    """Adds a password to a connection URL that has none; returns an invalid URL unchanged."""
    try:
        parts = split_url(url)
        # Up to the last @, since an unescaped password may contain one.
        has_one = ":" in parts.netloc.rpartition("@")[0] or "password" in parse_qs(parts.query)
    except ValueError:
        # The connection attempt reports a better error.
        return url
    return url if has_one else f"{url}{'&' if parts.query else '?'}password={quote(password, safe='')}"
