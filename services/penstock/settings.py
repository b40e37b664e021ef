"""Settings: frozen dataclasses read from the environment, refused when they make no sense.

A service declares its own dataclass and inherits `Platform`. Every field `foo_bar` is read from
`PENSTOCK_FOO_BAR`; a keyword given to `load` wins over the environment, and the default stands last.
`validate` is called once, at start-up, and names every field at fault.
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

ENVIRONMENT_PREFIX = "PENSTOCK_"

# Of any setting that may have a fraction: thirty years of seconds, which every timer and clock still takes.
MOST = 1e9

# A host alone has Kafka's own port; an IPv6 address stands in brackets.
_SERVER = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")

# The characters of RFC 3986 and no others.
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
    """A field with its explanation; the settings page of the docs is tested against these."""
    return field(default=default, metadata={"doc": doc})


def secret(doc: str) -> Any:
    """A field whose value no `repr` shows, and so no log and no traceback."""
    return field(default="", repr=False, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings: how to read them and how to refuse them."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **given: Any) -> Self:
        """Reads `PENSTOCK_*` from `environ` (the process's own by default), then applies `given`.

        Raises:
            SettingsError: a value does not parse, or `validate` refused the whole.
        """
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + item.name.upper()
            if given.get(item.name) is not None:
                values[item.name] = given[item.name]
            elif environ.get(variable, "") != "":
                values[item.name] = _parse(environ[variable], hints[item.name], variable)
        settings = cls(**values)
        # First, and alone: comparisons with NaN answer at random.
        problems = settings._absurd() or settings.validate()
        if problems:
            raise SettingsError("; ".join(problems))
        return settings

    def validate(self) -> list[str]:
        """Problems across fields, one sentence each; empty when all is well."""
        return []

    def _absurd(self) -> list[str]:
        found = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return [
            f"{ENVIRONMENT_PREFIX}{name.upper()}={value} must be a number, and at most {MOST:g}"
            for name, value in found
            # Written so that NaN is refused too.
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
    """Where a service shows its metrics."""

    metrics_host: str = option(
        "127.0.0.1", "Address at which metrics are served; 0.0.0.0 opens them to the network."
    )
    metrics_port: int = option(0, "Port of http://…/metrics, for Prometheus; 0 serves none.")

    def validate(self) -> list[str]:
        """A port must be one."""
        problems = super().validate()
        if not 0 <= self.metrics_port <= 65_535:
            problems.append(f"metrics_port={self.metrics_port} must be from 0 to 65535")
        return problems


KAFKA_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
KAFKA_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_OF_TLS = ("kafka_ca_file", "kafka_cert_file", "kafka_key_file")
_OF_USERS = ("kafka_user", "kafka_password_file", "kafka_password")
_OF_TOKENS = ("kafka_token_url", "kafka_client_id", "kafka_client_secret_file", "kafka_scope")
_OPTIONAL = ("kafka_password_file", "kafka_password", "kafka_scope")
_FILES = (*_OF_TLS, "kafka_password_file", "kafka_client_secret_file")

_ADDRESSES = ("kafka", "postgres", "prefix", "objects")


@dataclass(frozen=True, kw_only=True)
class Kafka(Settings):
    """What it takes to reach the cluster; all that a worker needs besides the object store."""

    kafka: str = option("127.0.0.1:9092", "Bootstrap servers, comma-separated host:port.")
    prefix: str = option("penstock.", "Put before the name of every topic and consumer group.")
    objects: str = option(
        "",
        "Object store for large contexts: a file:/// or s3:// URL, the same for all. "
        "Workers, gateway and task-sync do not start without.",
    )
    session_timeout_s: float = option(
        10.0, "Seconds after which Kafka gives a silent member's partitions away."
    )

    # How Kafka knows who this is; `kafka/security.py` makes the clients' arguments of it.
    kafka_protocol: str = option(
        "PLAINTEXT", f"How the brokers' listener is spoken to: {', '.join(KAFKA_PROTOCOLS)}."
    )
    kafka_ca_file: str = option(
        "", "PEM file of the authorities that sign the brokers' certificates; left out, the system's own."
    )
    kafka_cert_file: str = option(
        "", "PEM file of this process's certificate, with those between it and its authority."
    )
    kafka_key_file: str = option("", "PEM file of that certificate's key, without a passphrase.")
    kafka_mechanism: str = option(
        "", f"How SASL shows who this is: {', '.join(KAFKA_MECHANISMS)}. Needed with a SASL protocol."
    )
    kafka_user: str = option("", "User of PLAIN and SCRAM.")
    kafka_password_file: str = option("", "File that holds the user's password.")
    kafka_password: str = secret(
        "The password itself; a file is safer, since an environment is shown to many."
    )
    kafka_token_url: str = option(
        "", "Where OAUTHBEARER gets its tokens, by client credentials (RFC 6749, 4.4); https."
    )
    kafka_client_id: str = option("", "The client for which that address issues tokens.")
    kafka_client_secret_file: str = option("", "File that holds the client's secret.")
    kafka_scope: str = option(
        "", "Scopes asked for with the token, if the issuer wants any; apart by spaces."
    )
    topics_file: str = option(
        "", "TOML file that declares the topics instead of the packaged schemas/topics.toml."
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **given: Any) -> Self:
        """As `Settings.load`; the process's own environment is completed by a local deployment.

        When neither it nor `given` names any server or prefix, the addresses are those of the deployment that
        `penstock up` runs in PENSTOCK_DATA_DIR or `.penstock`, if one does. All of them or none: halves of two
        deployments would lose each other's records.
        """
        if environ is None:
            environ = os.environ
            told = any(
                given.get(name) or environ.get(ENVIRONMENT_PREFIX + name.upper()) for name in _ADDRESSES
            )
            environ = environ if told else {**environ, **local_environment()}
        return super().load(environ, **given)

    def validate(self) -> list[str]:
        """A session must be long enough for three heartbeats and the broker's own bounds (6 s to 30 min)."""
        problems = super().validate()
        if not 6 <= self.session_timeout_s <= 1800:
            problems.append(
                f"session_timeout_s={self.session_timeout_s} must be from 6 to 1800, the broker's bounds"
            )
        if not self.kafka:
            problems.append("kafka is empty: give host:port, for instance 127.0.0.1:9092")
        problems += [
            f"kafka={self.kafka!r}: {server.strip()!r} is not host:port"
            for server in self.kafka.split(",")
            if self.kafka and not _SERVER.fullmatch(server.strip())
        ]
        problems += _security_problems(self)
        if self.topics_file:
            problems += _unreadable("topics_file", self.topics_file)
        return problems


def _security_problems(given: Kafka) -> list[str]:
    """What of TLS and SASL contradicts itself; no sentence holds a secret."""
    protocol, mechanism = given.kafka_protocol, given.kafka_mechanism
    if protocol not in KAFKA_PROTOCOLS:
        return [f"kafka_protocol={protocol!r} must be one of {', '.join(KAFKA_PROTOCOLS)}"]
    sasl, encrypted = protocol.startswith("SASL"), protocol.endswith("SSL")
    if sasl and mechanism not in KAFKA_MECHANISMS:
        return [
            f"kafka_protocol={protocol} needs kafka_mechanism, one of {', '.join(KAFKA_MECHANISMS)}"
            + (f", not {mechanism!r}" if mechanism else "")
        ]
    wanted = _OF_TOKENS if mechanism == "OAUTHBEARER" else _OF_USERS
    problems = [
        # Sent by nobody: whoever set it believes this process to be safer than it is.
        f"{name} is set, but kafka_protocol={protocol} never uses it: use {better}, or leave it out"
        for names, used, better in (
            (_OF_TLS, encrypted, "SSL or SASL_SSL"),
            (("kafka_mechanism", *_OF_USERS, *_OF_TOKENS), sasl, "SASL_SSL"),
        )
        for name in names
        if getattr(given, name) and not used
    ]
    if sasl:
        problems += [
            f"{name} is set, but kafka_mechanism={mechanism} never uses it: leave it out"
            for name in (*_OF_USERS, *_OF_TOKENS)
            if getattr(given, name) and name not in wanted
        ]
        problems += [
            f"kafka_mechanism={mechanism} needs {name}"
            for name in wanted
            if name not in _OPTIONAL and not getattr(given, name)
        ]
        if wanted is _OF_USERS and bool(given.kafka_password) == bool(given.kafka_password_file):
            problems.append(f"kafka_mechanism={mechanism} needs either kafka_password_file or kafka_password")
        if given.kafka_token_url and not _is_private(given.kafka_token_url):
            problems.append(
                f"kafka_token_url={given.kafka_token_url} must begin with https://: the client's secret goes there"
            )
    if bool(given.kafka_cert_file) != bool(given.kafka_key_file):
        problems.append("kafka_cert_file and kafka_key_file must be set both or neither")
    for name in _FILES:
        if getattr(given, name):
            problems += _unreadable(name, getattr(given, name))
    return problems


def _is_private(url: str) -> bool:
    """Whether nobody between here and a URL reads along: https, or this machine."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https"
        or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"))
    )


def _unreadable(name: str, file: str) -> list[str]:
    if not Path(file).is_file():
        return [f"{name}={file}: there is no such file"]
    return [] if os.access(file, os.R_OK) else [f"{name}={file} may not be read by this user"]


@dataclass(frozen=True, kw_only=True)
class Progressing(Kafka):
    """What is a failure although the process is alive: work, and no progress (O2a)."""

    stall_timeout_s: float = option(
        60.0, "Seconds with work and without progress after which the process exits."
    )

    def validate(self) -> list[str]:
        """A rebalance takes up to a session timeout, and must not look like a stall."""
        problems = super().validate()
        if self.stall_timeout_s < 2 * self.session_timeout_s:
            problems.append(
                f"stall_timeout_s={self.stall_timeout_s} must be at least twice "
                f"session_timeout_s={self.session_timeout_s}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class Platform(Kafka):
    """Kafka and PostgreSQL: what every service of the platform shares."""

    postgres: str = option("postgresql://postgres@127.0.0.1:5432/postgres", "PostgreSQL connection URL.")
    event_source: str = option(
        "/penstock",
        "`source` of callbacks in the format of CloudEvents: a URI reference that names this deployment.",
    )

    # PostgreSQL behind a pooler, and its password.
    postgres_session: str = option(
        "",
        "URL of the same database past a pooler in transaction mode, for what needs a session of its own: locks, "
        "notifications, migrations. Given, PENSTOCK_POSTGRES is taken for the pooler's; empty is no pooler.",
    )
    postgres_password_file: str = option(
        "", "File with the password of PostgreSQL, read at the start; for URLs that have none."
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **given: Any) -> Self:
        """As `Kafka.load`; the URLs come with the password of `postgres_password_file`.

        A `postgres` that is given is the only one: a session in another database than the pool's would hold the
        wrong locks.

        Raises:
            SettingsError: also when the file cannot be read.
        """
        if given.get("postgres") and not given.get("postgres_session"):
            environ = {**(os.environ if environ is None else environ), "PENSTOCK_POSTGRES_SESSION": ""}
        settings = super().load(environ, **given)
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
        """Whether `postgres` is a pooler in transaction mode, which keeps nothing between two transactions."""
        return bool(self.postgres_session)

    @property
    def sessions(self) -> str:
        """The URL for sessions of one's own."""
        return self.postgres_session or self.postgres

    def validate(self) -> list[str]:
        """A source must be a URI reference, or targets would refuse every event."""
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
        raise SettingsError(f"postgres_password_file={file!r} cannot be read: {error}") from error
    if not password:
        raise SettingsError(f"postgres_password_file={file!r} is empty")
    return password


def with_password(url: str, password: str) -> str:
    """A connection URL with a password, unless it has one or is none."""
    try:
        parts = urlsplit(url)
        # Up to the last @, as an unescaped password may have one.
        has_one = ":" in parts.netloc.rpartition("@")[0] or "password" in parse_qs(parts.query)
    except ValueError:
        # Whoever connects says better what is wrong with it.
        return url
    return url if has_one else f"{url}{'&' if parts.query else '?'}password={quote(password, safe='')}"
