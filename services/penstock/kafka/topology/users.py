"""Users of a cluster: adds the entries of their access lists, and sets their passwords for SCRAM.

It works as a user who may alter the cluster. It removes an entry only when asked, and none outside
the deployment's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import ClusterAuthorizationFailedError, for_code
from aiokafka.protocol.admin import (
    CreateAclsRequest_v1,
    DeleteAclsRequest_v1,
    DescribeAclsRequest,
)
from aiokafka.protocol.types import (
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from penstock.core.scram import ITERATIONS, SALT_BYTES, salted_password
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.client.connection import admin_client, translated
from penstock.kafka.client.protocol import RequestOf, struct
from penstock.kafka.topology import rights
from penstock.kafka.topology.acls import AccessRule
from penstock.settings import Kafka

# Numbers in Kafka's protocol.
_KINDS = {rights.TOPIC: 2, rights.GROUP: 3}
_PATTERNS = {rights.LITERAL: 3, rights.PREFIXED: 4}
_OPERATIONS = {
    rights.READ: 3,
    rights.WRITE: 4,
    rights.CREATE: 5,
    rights.DELETE: 6,
    rights.ALTER: 7,
    rights.DESCRIBE: 8,
    rights.DESCRIBE_CONFIGS: 10,
    rights.ALTER_CONFIGS: 11,
}
_ANY = 1
_ALLOW = 3
_EVERY_HOST = "*"
_SCRAM_SHA_512 = 2
_SECURITY_DISABLED = 54


# AlterUserScramCredentials.
_ALTER_SCRAM = struct(
    51,
    0,
    Schema(
        (
            "deletions",
            CompactArray(("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields)),
        ),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
    flexible=True,
)


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One entry at the cluster, which allows one operation.

    Attributes:
        principal: such as `User:penstock-stages`.
        kind: TOPIC or GROUP of `kafka.topology.rights`.
        name: of topic or group in full, or its beginning.
        pattern: LITERAL or PREFIXED.
        operation: Kafka's own name.
    """

    principal: str
    kind: str
    name: str
    pattern: str
    operation: str

    def to_wire(self) -> dict[str, str]:
        """The JSON object that `penstock topics grant --json` prints."""
        return {
            "principal": self.principal,
            "kind": self.kind,
            "name": self.name,
            "pattern": self.pattern,
            "operation": self.operation,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cluster differs from the access lists of some principals.

    Attributes:
        add: entries that it lacks.
        beyond: entries of these principals in this deployment that their lists do not have.
    """

    add: tuple[Entry, ...]
    beyond: tuple[Entry, ...]


def entries_of(rules: Iterable[AccessRule], principal: str) -> frozenset[Entry]:
    """The entries of access rules.

    Args:
        rules: see `acls.acls`.
        principal: of a service, such as `User:penstock-{service}`.
    """
    return frozenset(
        Entry(principal.replace("{service}", rule.service), rule.kind, rule.name, rule.pattern, operation)
        for rule in rules
        for operation in rule.operations
    )


async def grant(
    settings: Kafka, rules: Sequence[AccessRule], principal: str, *, revoke: bool = False
) -> Plan:
    """Adds the entries that the cluster lacks, and returns the differences that it found.

    Args:
        settings: of a user who may alter the cluster.
        rules: see `acls.acls`.
        principal: see `entries_of`.
        revoke: whether to remove the entries beyond the lists too.

    Raises:
        KafkaRefused: the user may not alter the cluster, or its brokers have no authorizer.
        KafkaUnavailable: some entries may be added or removed.
    """
    wanted = entries_of(rules, principal)
    async with admin_client(settings) as admin:
        with translated():
            found = {
                entry
                for each in {entry.principal for entry in wanted}
                for entry in await _entries_at(admin, each)
                if entry.name.startswith(settings.prefix)
            }
            plan = Plan(tuple(sorted(wanted - found)), tuple(sorted(found - wanted)))
            if plan.add:
                added = RequestOf(CreateAclsRequest_v1, [*map(_protocol_entry, plan.add)])
                answer = await admin._send_to_controller(added)  # noqa: SLF001 (it has no method for these requests)
                for code, message in answer.creation_responses:
                    _check(code, message)
            if revoke and plan.beyond:
                removed = RequestOf(DeleteAclsRequest_v1, [*map(_protocol_entry, plan.beyond)])
                answer = await admin._send_to_controller(removed)  # noqa: SLF001 (see above)
                for code, message, _matching in answer.filter_responses:
                    _check(code, message)
    return plan


async def set_passwords(
    settings: Kafka, passwords: Mapping[str, str], random_bytes: Callable[[int], bytes]
) -> None:
    """Sets passwords for SCRAM-SHA-512; open connections of the users stay open.

    Args:
        settings: of a user who may alter the cluster.
        passwords: by user; see `core.scram.password_fault`.
        random_bytes: makes a salt of that many bytes.

    Raises:
        KafkaRefused: the user may not alter the cluster.
        KafkaUnavailable: some passwords may be set.
    """
    if not passwords:
        return
    salted: list[tuple[Any, ...]] = []
    for user, password in sorted(passwords.items()):
        salt = random_bytes(SALT_BYTES)
        salted.append((user, _SCRAM_SHA_512, ITERATIONS, salt, salted_password(password, salt, "sha512"), {}))
    async with admin_client(settings) as admin:
        with translated():
            answer = await admin._send_to_controller(RequestOf(_ALTER_SCRAM, [], salted, {}))  # noqa: SLF001 (see above)
            for _user, code, message, _tags in answer.results:
                _check(code, message)


async def _entries_at(admin: AIOKafkaAdminClient, principal: str) -> list[Entry]:
    request = DescribeAclsRequest(_ANY, None, _ANY, principal, None, _ANY, _ANY)
    answer = await admin._send_to_controller(request)  # noqa: SLF001 (see above)
    _check(answer.error_code, answer.error_message)
    kinds, patterns, operations = (
        {number: name for name, number in names.items()} for names in (_KINDS, _PATTERNS, _OPERATIONS)
    )
    return [
        Entry(found_principal, kinds[kind], name, patterns[pattern], operations[operation])
        for kind, name, pattern, found in answer.resources
        if kind in kinds and pattern in patterns
        for found_principal, host, operation, permission in found
        if operation in operations and permission == _ALLOW and host == _EVERY_HOST
    ]


def _check(code: int, message: str | None) -> None:
    if code == _SECURITY_DISABLED:
        raise KafkaRefused(
            "Kafka has no access lists: set authorizer.class.name of its brokers and controllers"
        )
    error = for_code(code)
    if error is ClusterAuthorizationFailedError:
        raise KafkaRefused("Kafka does not permit this: the user must be one that may alter the cluster")
    if code:
        raise KafkaUnavailable(f"Kafka: {error.__name__}: {message}")


def _protocol_entry(entry: Entry) -> tuple[Any, ...]:
    return (
        _KINDS[entry.kind],
        entry.name,
        _PATTERNS[entry.pattern],
        entry.principal,
        _EVERY_HOST,
        _OPERATIONS[entry.operation],
        _ALLOW,
    )
