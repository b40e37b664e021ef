"""Who may do what: roles, actions, namespaces and the keys of the API. Pure; the clock and randomness are arguments.

A namespace is no thing of its own: it is the part of a type's name before the first `--` (`acme--transcode` is of `acme`), and
`default` where there is none. So a task, its idempotency key, its concurrency key and its topic follow from the type, without
a look-up, and Kafka's prefixed ACLs can be drawn along the same line. It is no dot, because a dot ends the type in the name of
a stage, and because Kafka takes topics for the same that differ in a dot and an underscore.
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
# Written for all namespaces, those that are yet to come included.
EVERY_NAMESPACE = "*"

# Ends the namespace in the name of a type.
SEPARATOR = "--"
_NAMESPACE = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_LONGEST_NAMESPACE = 50

SECRET_BYTES = 32
_ID = re.compile(r"[0-9a-f]{16}")


class Action(StrEnum):
    """What a route does, as far as it matters who may."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"
    CONFIGURE = "configure"


class Role(StrEnum):
    """What a key is for."""

    READER = "reader"
    SUBMITTER = "submitter"
    WORKER = "worker"
    OPERATOR = "operator"
    ADMIN = "admin"


# The one table. A worker reads nothing: what it is given in hand is all that it needs.
ALLOWED: Mapping[Role, frozenset[Action]] = {
    Role.READER: frozenset({Action.READ}),
    Role.SUBMITTER: frozenset({Action.READ, Action.SUBMIT}),
    Role.WORKER: frozenset({Action.WORK}),
    Role.OPERATOR: frozenset({Action.READ, Action.SUBMIT, Action.OPERATE}),
    Role.ADMIN: frozenset(Action),
}


@dataclass(frozen=True, slots=True)
class Grant:
    """What somebody may do.

    Attributes:
        actor: who it is, as the audit names it: `key:ID` or `oidc:SUBJECT`; empty where nobody is asked.
        roles: what for.
        namespaces: in which; None is all of them.
        rate: requests a second, in place of the gateway's setting; None is that.
    """

    actor: str
    roles: frozenset[Role]
    namespaces: frozenset[str] | None
    rate: float | None = None

    def allows(self, action: Action) -> bool:
        """Whether one of its roles may do this."""
        return any(action in ALLOWED[role] for role in self.roles)

    def covers(self, type_name: str) -> bool:
        """Whether a type is in its namespaces."""
        return self.namespaces is None or namespace_of(type_name) in self.namespaces


# Where nobody is asked who they are: only on loopback.
ANYBODY = Grant("", frozenset({Role.ADMIN}), None)


def namespace_of(type_name: str) -> str:
    """The namespace of a type, and of all that belongs to it."""
    namespace, separator, _ = type_name.partition(SEPARATOR)
    return namespace if separator and namespace else DEFAULT_NAMESPACE


def namespaces_in(names: Collection[str]) -> frozenset[str] | None:
    """Namespaces as they are written; None is all of them.

    Raises:
        ValueError: one of them is no name, or there is none at all; says which.
    """
    if not names:
        raise ValueError("no namespace is named: give some, or * for all of them")
    if EVERY_NAMESPACE in names:
        if len(set(names)) > 1:
            raise ValueError("* is all namespaces: name no others beside it")
        return None
    for name in names:
        if not _NAMESPACE.fullmatch(name) or len(name) > _LONGEST_NAMESPACE:
            raise ValueError(
                f"{name!r} is no namespace: letters, digits, _ and single -, at most {_LONGEST_NAMESPACE} characters"
            )
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the API as it is kept: never with its secret.

    Attributes:
        id: by which it is named, 16 hexadecimal digits; no secret.
        digest: of its secret.
        grant: what it is for.
        expires_at: from then on it is refused; None is never.
    """

    id: str
    digest: bytes
    grant: Grant
    expires_at: datetime | None


def token_of(key_id: str, secret: str) -> str:
    """What a client sends."""
    return f"pk_{key_id}_{secret}"


def digest_of(secret: str) -> bytes:
    """What is kept of a secret: SHA-256.

    A slow hash is for passwords, of which an attacker can try all that people choose. A secret of 256 random bits cannot be
    guessed however fast one tries, and a slow hash would only cost each request its time. Without salt: no two are the same.
    """
    return hashlib.sha256(secret.encode()).digest()


def split(token: str) -> tuple[str, str] | None:
    """Id and secret of a token; None when it is none of ours."""
    kind, _, rest = token.partition("_")
    key_id, blank, secret = rest.partition("_")
    # Headers can hold what no text can be encoded to.
    if not token.isascii() or kind != "pk" or not blank or not secret or not _ID.fullmatch(key_id):
        return None
    return key_id, secret


def recognised(keys: Mapping[str, Key], token: str, now: datetime) -> Key | None:
    """The key that a token is the secret of, while it holds; None otherwise, and nothing tells why.

    Args:
        keys: those that are not revoked, by id.
        token: as it was sent.
        now: the moment.
    """
    parts = split(token)
    if parts is None:
        return None
    key = keys.get(parts[0])
    if key is None or (key.expires_at is not None and key.expires_at <= now):
        return None
    # In the same time wherever they differ.
    return key if hmac.compare_digest(key.digest, digest_of(parts[1])) else None


def roles_in(names: Iterable[str], mapping: Mapping[str, str]) -> frozenset[Role]:
    """The roles that somebody else's names for them stand for; what stands for none is left out.

    Args:
        names: as a token of an identity provider has them.
        mapping: from its names to ours; where it is empty, the names are ours.
    """
    known = frozenset(Role)
    found = (mapping.get(name) if mapping else name for name in names)
    return frozenset(Role(name) for name in found if name in known)


def storable(text: str) -> str:
    """A text of somebody else's, with a question mark for what PostgreSQL's texts cannot hold."""
    return text.replace("\0", "?").encode(errors="replace").decode()
