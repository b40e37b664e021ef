"""The secrets that sign for the targets of this process, in memory.

A target's own secrets sign; without any, those of its namespace; without any, those of the
deployment; without any, those of the setting.

What this module guarantees: a changed secret is read again as soon as its notification arrives. A
load and a notification during it lead to another load. A process that loses its session for
notifications begins again without a cache. It fails closed: a target whose own secrets cannot be
used is not called with wider ones.

A namespace without secrets of single targets costs no query for its targets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.signing import Ed25519Key, SigningKey, SymmetricKey, UnusableSecrets
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.event import origin_of
from penstock.core.target import TargetId
from penstock.core.webhook_secrets import (
    REFERENCE_VARIABLE_PREFIX,
    Scheme,
    Scope,
    parse_reference,
    scopes_of,
    secret_problem,
    secrets_in,
)
from penstock.crypto import Sealer, UnreadableSecret
from penstock.postgres import callback_secrets
from penstock.postgres.callback_secrets import Stored, stored_in

log = logging.getLogger(__name__)

CAPACITY = 50_000
# Variables and files are read again this often.
REFERENCES_EVERY_S = 5.0
# Larger files are no lists of secrets.
_FILE_BYTES = 16 * 1024
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class _Secret:
    """A stored secret in memory.

    Attributes:
        keys: sign with it; several when a reference leads to several secrets.
        until_s: when it expires, by the monotonic clock.
        wider_until_s: until when wider scopes sign too, by the monotonic clock.
        problem: why it cannot be used; None when it can.
        by_reference: whether it must be read again.
    """

    keys: tuple[SigningKey, ...]
    until_s: float
    wider_until_s: float
    problem: str | None
    by_reference: bool


@dataclass(slots=True)
class _Entry:
    """The secrets of one scope.

    Attributes:
        secrets: the newest first.
        has_targets: of a namespace: whether one of its targets has secrets of its own.
    """

    secrets: list[_Secret] = field(default_factory=list)
    has_targets: bool = False


class SecretCache:
    """Finds the secrets that sign for a target.

    Args:
        settings: of the service.
        pool: of the database.
        environ: has the variables of references.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._pool = pool
        self._environ = environ
        self._folder = Path(settings.callback_secrets_dir) if settings.callback_secrets_dir else None
        self._sealer = Sealer(settings.encryption_keys)
        self._fallback: list[SigningKey] = [SymmetricKey(secret) for secret in settings.callback_secrets]
        self._entries: OrderedDict[Scope, _Entry] = OrderedDict()
        self._changed: set[Scope] = set()
        self._wakened = asyncio.Event()
        # One load at a time: a notification during a load finds the entry, and it is read again.
        self._loading = asyncio.Lock()
        self._reported: set[str] = set()

    @property
    def unusable(self) -> int:
        """How many secrets in memory cannot be used."""
        return sum(secret.problem is not None for entry in self._entries.values() for secret in entry.secrets)

    def invalidate(self, payload: str) -> None:
        """Handles a notification that a secret of a scope has changed."""
        scope = callback_secrets.parse_notification(payload)
        # The namespace too: whether its targets have secrets may have changed.
        self._changed |= {scope, Scope(scope.namespace)}
        self._wakened.set()

    async def prepare(self, targets: Collection[TargetId]) -> None:
        """Reads the secrets of targets that are not in memory; waits while PostgreSQL is away."""
        if not any(self._missing(target) for target in targets):
            return
        async with self._loading:
            # Namespaces first: most have no secrets of single targets, whose scopes are not read.
            namespaces = {scope for target in targets for scope in scopes_of(target)[1:]}
            await self._load([scope for scope in namespaces if scope not in self._entries])
            missing = {scope for target in targets for scope in self._missing(target)}
            await self._load(list(missing))
        while len(self._entries) > CAPACITY:
            self._entries.popitem(last=False)

    async def keys_of(self, target: TargetId) -> Sequence[SigningKey]:
        """The keys that sign for a target.

        Raises:
            UnusableSecrets: there are secrets, and none can be used.
        """
        if self._missing(target):
            # Evicted since it was prepared.
            await self.prepare([target])
        now_s = time.monotonic()
        keys: list[SigningKey] = []
        for scope in scopes_of(target):
            entry = self._entries.get(scope)
            if entry is None:
                continue
            self._entries.move_to_end(scope)
            valid = [secret for secret in entry.secrets if secret.until_s > now_s]
            if not valid:
                continue
            keys += [key for secret in valid for key in secret.keys]
            if any(secret.wider_until_s > now_s for secret in valid):
                continue
            if not keys:
                raise UnusableSecrets(str(valid[0].problem))
            return keys
        return keys + self._fallback

    async def run(self) -> None:
        """Reads changed secrets again, and those by reference regularly, until cancelled."""
        references_at_s = time.monotonic() + REFERENCES_EVERY_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, references_at_s - time.monotonic())):
                    await self._wakened.wait()
            except TimeoutError:
                references_at_s = time.monotonic() + REFERENCES_EVERY_S
                self._changed |= {
                    scope
                    for scope, entry in self._entries.items()
                    if any(secret.by_reference for secret in entry.secrets)
                }
            self._wakened.clear()
            async with self._loading:
                changed, self._changed = self._changed, set()
                await self._load([scope for scope in changed if scope in self._entries])

    def _missing(self, target: TargetId) -> list[Scope]:
        """The scopes of a target that must be in memory and are not."""
        own, namespace, deployment = scopes_of(target)
        missing = [scope for scope in (namespace, deployment) if scope not in self._entries]
        entry = self._entries.get(namespace)
        if entry is not None and entry.has_targets and own not in self._entries:
            missing.append(own)
        return missing

    async def _load(self, scopes: Sequence[Scope]) -> None:
        if not scopes:
            return
        started_s = time.monotonic()
        namespaces = [scope.namespace for scope in scopes if not scope.url]
        rows, with_targets = await retry_until_available(
            lambda: self._read(scopes, namespaces), waiting_for="reading secrets of callbacks"
        )
        entries = {scope: _Entry(has_targets=scope.namespace in with_targets) for scope in scopes}
        for row in rows:
            stored = stored_in(row)
            keys, problem = await self._keys_in(stored)
            entries[stored.scope].secrets.append(
                _Secret(
                    keys,
                    _FOREVER if row["left_s"] is None else started_s + row["left_s"],
                    0.0 if row["wider_s"] is None else started_s + row["wider_s"],
                    problem,
                    stored.reference is not None,
                )
            )
        self._entries.update(entries)

    async def _read(
        self, scopes: Sequence[Scope], namespaces: Sequence[str]
    ) -> tuple[list[asyncpg.Record], set[str]]:
        with_targets = await callback_secrets.with_targets(self._pool, namespaces) if namespaces else set()
        return await callback_secrets.of_scopes(self._pool, scopes), with_targets

    async def _keys_in(self, stored: Stored) -> tuple[tuple[SigningKey, ...], str | None]:
        """The keys of a stored secret, or why there are none."""
        try:
            keys = tuple(_key_of(secret, stored) for secret in (await self._secrets_of(stored)))
        except UnreadableSecret as error:
            self._report(stored, str(error))
            return (), f"secret {stored.id} cannot be used: {error}"
        self._reported.discard(stored.id)
        return keys, None

    async def _secrets_of(self, stored: Stored) -> Iterable[str]:
        if stored.sealed is not None:
            return [self._sealer.open(stored.sealed, stored.identity)]
        assert stored.reference is not None, "a secret is encrypted or by reference"
        kind, name = parse_reference(stored.reference)
        if kind == "env":
            text = self._environ.get(REFERENCE_VARIABLE_PREFIX + name, "")
        elif self._folder is None:
            raise UnreadableSecret("PENSTOCK_CALLBACK_SECRETS_DIR is not set")
        else:
            text = await asyncio.to_thread(_content, self._folder / name)
        secrets = secrets_in(text)
        if not secrets:
            raise UnreadableSecret(f"{stored.reference} is empty or not set")
        for secret in secrets:
            if (problem := secret_problem(secret, stored.scheme)) is not None:
                raise UnreadableSecret(f"{stored.reference} {problem}")
        return secrets[: callback_secrets.MAX_OF_SCOPE]

    def _report(self, stored: Stored, reason: str) -> None:
        if stored.id in self._reported:
            return
        self._reported.add(stored.id)
        log.error(
            "A secret of callbacks cannot be used; without another one its targets are not called",
            extra={
                "event": "callback_secret_unusable",
                "secret": stored.id,
                "namespace": stored.scope.namespace,
                "target": origin_of(stored.scope.url) if stored.scope.url else None,
                "reason": reason,
            },
        )


def _key_of(secret: str, stored: Stored) -> SigningKey:
    """The key that signs with a secret.

    Raises:
        UnreadableSecret: it is not the private key of the public key that receivers have.
    """
    if stored.scheme is Scheme.V1:
        return SymmetricKey(secret)
    key = Ed25519Key(secret)
    if key.public != stored.public_key:
        raise UnreadableSecret("the private key is not the one of its public key")
    return key


def _content(file: Path) -> str:
    """The text of a file.

    Raises:
        UnreadableSecret: it cannot be read, or is no list of secrets.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_BYTES + 1)
        if len(data) > _FILE_BYTES:
            raise UnreadableSecret(f"file:{file.name} is larger than {_FILE_BYTES:,} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSecret(f"file:{file.name} cannot be read: {type(error).__name__}") from error
