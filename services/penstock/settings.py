"""Settings: frozen dataclasses that are read from the environment and validated at start-up.

A service declares its own dataclass and inherits `Platform`. Each field `foo_bar` is read from
`PENSTOCK_FOO_BAR`. A keyword of `load` wins over the environment, and the environment over the
default. `validate` runs once, at start-up, and names the variable of every wrong field.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints
from urllib.parse import parse_qs, quote, urlsplit

from penstock.discovery import local_environment
from penstock.errors import SettingsError
from penstock.variables import PREFIX, with_variables

ENVIRONMENT_PREFIX = PREFIX

# The largest value of any float setting: thirty years in seconds, which every timer accepts.
MOST = 1e9

# A host with an optional port; an IPv6 address stands in brackets.
_SERVER = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")

# Only the characters of RFC 3986.
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")

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
        """
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
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


@dataclass(frozen=True, kw_only=True)
class Metered(Settings):
    """The address of a service's metrics."""

    metrics_host: str = option(
        "127.0.0.1", "Address that the metrics server listens on; 0.0.0.0 opens it to the network."
    )
    metrics_port: int = option(0, "Port of the metrics server (/metrics, /livez, /readyz); 0 turns it off.")

    def validate(self) -> list[str]:
        """The port must be from 0 to 65535."""
        problems = super().validate()
        if not 0 <= self.metrics_port <= 65_535:
            problems.append(f"metrics_port={self.metrics_port} must be from 0 to 65535")
        return problems


KAFKA_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
KAFKA_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_TLS_SETTINGS = ("kafka_ca_file", "kafka_cert_file", "kafka_key_file")
_USER_SETTINGS = ("kafka_user", "kafka_password_file", "kafka_password")
_TOKEN_SETTINGS = ("kafka_token_url", "kafka_client_id", "kafka_client_secret_file", "kafka_scope")
_OPTIONAL = ("kafka_password_file", "kafka_password", "kafka_scope")
_FILES = (*_TLS_SETTINGS, "kafka_password_file", "kafka_client_secret_file")

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

    # Authentication to Kafka; `kafka/security.py` turns it into arguments of the client library.
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
        problems += _security_problems(self)
        if self.topics_file:
            problems += _unreadable("topics_file", self.topics_file)
        return problems


def _security_problems(settings: Kafka) -> list[str]:
    """Contradictions between the settings of TLS and SASL; no sentence contains a secret."""
    protocol, mechanism = settings.kafka_protocol, settings.kafka_mechanism
    if protocol not in KAFKA_PROTOCOLS:
        return [f"kafka_protocol={protocol!r} must be one of {', '.join(KAFKA_PROTOCOLS)}"]
    sasl, encrypted = protocol.startswith("SASL"), protocol.endswith("SSL")
    if sasl and mechanism not in KAFKA_MECHANISMS:
        return [
            f"kafka_protocol={protocol} needs kafka_mechanism, one of {', '.join(KAFKA_MECHANISMS)}"
            + (f", not {mechanism!r}" if mechanism else "")
        ]
    required = _TOKEN_SETTINGS if mechanism == "OAUTHBEARER" else _USER_SETTINGS
    problems = [
        # An unused credential is a problem: the operator would believe the connection to be safer
        # than it is.
        f"{name} is set, but kafka_protocol={protocol} never uses it: use {better}, or leave it out"
        for names, used, better in (
            (_TLS_SETTINGS, encrypted, "SSL or SASL_SSL"),
            (("kafka_mechanism", *_USER_SETTINGS, *_TOKEN_SETTINGS), sasl, "SASL_SSL"),
        )
        for name in names
        if getattr(settings, name) and not used
    ]
    if sasl:
        problems += [
            f"{name} is set, but kafka_mechanism={mechanism} never uses it: leave it out"
            for name in (*_USER_SETTINGS, *_TOKEN_SETTINGS)
            if getattr(settings, name) and name not in required
        ]
        problems += [
            f"kafka_mechanism={mechanism} needs {name}"
            for name in required
            if name not in _OPTIONAL and not getattr(settings, name)
        ]
        if required is _USER_SETTINGS and bool(settings.kafka_password) == bool(settings.kafka_password_file):
            problems.append(f"kafka_mechanism={mechanism} needs either kafka_password_file or kafka_password")
        if settings.kafka_token_url and not _is_private(settings.kafka_token_url):
            problems.append(
                f"kafka_token_url={settings.kafka_token_url} must begin with https://: the client's secret is sent there"
            )
    if bool(settings.kafka_cert_file) != bool(settings.kafka_key_file):
        problems.append("kafka_cert_file and kafka_key_file must be set both or neither")
    for name in _FILES:
        if getattr(settings, name):
            problems += _unreadable(name, getattr(settings, name))
    return problems


def _is_private(url: str) -> bool:
    """Whether requests to a URL cannot be read on the way: it is https, or on this machine."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https"
        or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"))
    )


def _unreadable(name: str, file: str) -> list[str]:
    if not Path(file).is_file():
        return [f"{name}={file}: this file does not exist"]
    return (
        []
        if os.access(file, os.R_OK)
        else [f"{name}={file} cannot be read by this user: change its permissions"]
    )


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
        parts = urlsplit(url)
        # Up to the last @, since an unescaped password may contain one.
        has_one = ":" in parts.netloc.rpartition("@")[0] or "password" in parse_qs(parts.query)
    except ValueError:
        # The connection attempt reports a better error.
        return url
    return url if has_one else f"{url}{'&' if parts.query else '?'}password={quote(password, safe='')}"
