"""Authorization: roles, actions, namespaces and API keys. Pure; the clock is an argument.

A namespace is the part of a type's name before the first `--`: `acme--transcode` is in `acme`. A
type without `--` is in `default`. So the namespace of a task, an idempotency key, a concurrency key
or a topic follows from its type without a query, and Kafka's prefixed ACLs apply to it.

The separator is not a dot for two reasons: a dot separates type and stage in a stage's name, and
topics that differ only in a dot and an underscore collide in Kafka.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

DEFAULT_NAMESPACE = "default"
# Stands for all namespaces, also for future ones.
EVERY_NAMESPACE = "*"

# Separates the namespace from the rest of a type's name.
SEPARATOR = "--"
_NAMESPACE = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_MAX_NAMESPACE_LENGTH = 50

SECRET_BYTES = 32
_ID = re.compile(r"[0-9a-f]{16}")


class Action(StrEnum):
    """The kind of access that a route needs."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"
    CONFIGURE = "configure"


class Role(StrEnum):
    """A set of actions that an API key or token may perform."""

    READER = "reader"
    SUBMITTER = "submitter"
    WORKER = "worker"
    OPERATOR = "operator"
    ADMIN = "admin"


# A worker may not read: the tasks that it claims contain all that it needs.
ALLOWED: Mapping[Role, frozenset[Action]] = {
    Role.READER: frozenset({Action.READ}),
    Role.SUBMITTER: frozenset({Action.READ, Action.SUBMIT}),
    Role.WORKER: frozenset({Action.WORK}),
    Role.OPERATOR: frozenset({Action.READ, Action.SUBMIT, Action.OPERATE}),
    Role.ADMIN: frozenset(Action),
}


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of the sender of a request.

    Attributes:
        actor: the sender, as the audit names it: `key:ID` or `oidc:SUBJECT`; empty without
            authentication.
        roles: its roles.
        namespaces: the namespaces that it may access; None is all.
        rate: its limit in requests a second; None is the limit from the gateway's settings.
    """

    actor: str
    roles: frozenset[Role]
    namespaces: frozenset[str] | None
    rate: float | None = None

    def allows(self, action: Action) -> bool:
        """Whether one of the roles permits an action."""
        return any(action in ALLOWED[role] for role in self.roles)

    def covers(self, type_name: str) -> bool:
        """Whether the grant includes the namespace of a type."""
        return self.namespaces is None or namespace_of(type_name) in self.namespaces


# The grant of every request when authentication is off, which is possible only on a loopback
# address.
UNRESTRICTED = Grant("", frozenset({Role.ADMIN}), None)


def namespace_of(type_name: str) -> str:
    """The namespace of a type and of its tasks."""
    namespace, separator, _ = type_name.partition(SEPARATOR)
    return namespace if separator and namespace else DEFAULT_NAMESPACE


def parse_namespaces(names: Collection[str]) -> frozenset[str] | None:
    """Validates names of namespaces; None is all namespaces, which is written `*`.

    Raises:
        ValueError: a name is invalid, or `names` is empty.
    """
    if not names:
        raise ValueError("no namespace is given: give some, or * for all")
    if EVERY_NAMESPACE in names:
        if len(set(names)) > 1:
            raise ValueError("* is all namespaces: give no other namespace with it")
        return None
    for name in names:
        if not _NAMESPACE.fullmatch(name) or len(name) > _MAX_NAMESPACE_LENGTH:
            raise ValueError(
                f"{name!r} is no namespace: use letters, digits, _ and single -, "
                f"at most {_MAX_NAMESPACE_LENGTH} characters"
            )
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as it is stored, without its secret.

    Attributes:
        id: 16 hexadecimal digits; public.
        digest: SHA-256 of the secret.
        grant: what the key permits.
        expires_at: the time from which the key is refused; None is never.
    """

    id: str
    digest: bytes
    grant: Grant
    expires_at: datetime | None


def token_of(key_id: str, secret: str) -> str:
    """The token that a client sends."""
    return f"pk_{key_id}_{secret}"


def digest_of(secret: str) -> bytes:
    """SHA-256 of a secret, the form in which it is stored.

    A slow, salted hash protects passwords, which attackers can guess. A secret of 256 random bits
    cannot be guessed and is unique, so a slow hash would only delay each request.
    """
    return hashlib.sha256(secret.encode()).digest()


def split_token(token: str) -> tuple[str, str] | None:
    """Id and secret of a token; None when it is not the token of an API key."""
    prefix, _, rest = token.partition("_")
    key_id, separator, secret = rest.partition("_")
    # A header may contain characters that UTF-8 cannot encode.
    if not token.isascii() or prefix != "pk" or not separator or not secret or not _ID.fullmatch(key_id):
        return None
    return key_id, secret


def valid_key(api_keys: Mapping[str, ApiKey], key_id: str, now: datetime) -> ApiKey | None:
    """The API key with an id; None when it is revoked or has expired."""
    api_key = api_keys.get(key_id)
    expired = api_key is not None and api_key.expires_at is not None and api_key.expires_at <= now
    return None if expired else api_key


def find_valid_key(api_keys: Mapping[str, ApiKey], token: str, now: datetime) -> ApiKey | None:
    """The API key that a token belongs to; None when the token is not valid.

    Args:
        api_keys: the keys that are not revoked, by id.
        token: as the client sent it.
        now: the current time.
    """
    parts = split_token(token)
    if parts is None:
        return None
    api_key = valid_key(api_keys, parts[0], now)
    if api_key is None:
        return None
    # In constant time, so that the response time does not reveal the digest.
    return api_key if hmac.compare_digest(api_key.digest, digest_of(parts[1])) else None


def map_roles(names: Iterable[str], mapping: Mapping[str, str]) -> frozenset[Role]:
    """Translates the role names of an identity provider; names without a role are ignored.

    Args:
        names: the names in a token.
        mapping: from the provider's names to roles; empty when the provider uses the names of the
            roles.
    """
    known = frozenset(Role)
    translated = (mapping.get(name) if mapping else name for name in names)
    return frozenset(Role(name) for name in translated if name in known)


def storable(text: str) -> str:
    """An external text, with `?` in place of each character that PostgreSQL cannot store."""
    return text.replace("\0", "?").encode(errors="replace").decode()
