"""The access list of each service on Kafka, of which commands and manifests are printed.

Read and Write include Describe. An idempotent producer needs only Write on its topics.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.kafka.topics import (
    CALLBACKS,
    CALLBACKS_DEAD,
    CALLBACKS_DIVERTED,
    CALLBACKS_DIVERTED_REJECTED,
    CALLBACKS_REJECTED,
    CALLBACKS_RESULTS,
    DEPLOYMENT,
    EVENTS,
    HEARTBEATS,
    HEARTBEATS_REJECTED,
    READY,
    REVOKED,
    STAGE_RESULTS,
    STAGE_RESULTS_REJECTED,
    SUBMITTED,
    SUBMITTED_REJECTED,
    Topic,
)

TOPIC = "topic"
GROUP = "group"
LITERAL = "literal"
PREFIXED = "prefixed"

READ = "Read"
WRITE = "Write"
CREATE = "Create"
DELETE = "Delete"
DESCRIBE = "Describe"
ALTER = "Alter"
DESCRIBE_CONFIGS = "DescribeConfigs"
ALTER_CONFIGS = "AlterConfigs"

# The prefix, behind the deployment's, of groups that users' own consumers of events may use.
CONSUMERS = "consumers."
_READY = f"{READY}."
_WORKERS = "workers."


@dataclass(frozen=True, slots=True)
class AccessRule:
    """One entry of an access list.

    Attributes:
        service: it applies to.
        kind: TOPIC or GROUP.
        name: in full, or its beginning.
        pattern: LITERAL or PREFIXED.
        operations: Kafka's own names.
    """

    service: str
    kind: str
    name: str
    pattern: str
    operations: tuple[str, ...]

    def to_wire(self) -> dict[str, Any]:
        """As in the `acls` of a Strimzi KafkaUser."""
        return {
            "resource": {"type": self.kind, "name": self.name, "patternType": self.pattern},
            "operations": list(self.operations),
        }


def _topics(*operations: str, of: Iterable[Topic]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [(TOPIC, topic.name, LITERAL, operations) for topic in of]


def _all(kind: str, begin: str, *operations: str) -> tuple[str, str, str, tuple[str, ...]]:
    return (kind, begin, PREFIXED, operations)


def _one(kind: str, name: str, *operations: str) -> tuple[str, str, str, tuple[str, ...]]:
    return (kind, name, LITERAL, operations)


_OUTBOX = (EVENTS, CALLBACKS, REVOKED)

_BY_SERVICE: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    # Publishes events of cancellations, writes for workers without Kafka, and explains why a task
    # waits.
    "gateway": [
        *_topics(WRITE, of=(HEARTBEATS, STAGE_RESULTS, *_OUTBOX)),
        _all(TOPIC, _READY, READ, CREATE),
        _all(GROUP, _WORKERS, READ),
    ],
    # Ingests, releases, and searches for lost records; it writes a mark where no record is left to
    # read. It reads and deletes records that it withdraws from busy workers.
    "task-sync": [
        _one(TOPIC, SUBMITTED.name, READ),
        _one(GROUP, "task-sync", READ),
        *_topics(WRITE, of=(SUBMITTED_REJECTED, HEARTBEATS, STAGE_RESULTS)),
        _all(TOPIC, _READY, READ, WRITE, CREATE, DELETE),
        _all(GROUP, _WORKERS, DESCRIBE),
        _one(GROUP, "heartbeats", DESCRIBE),
        _one(GROUP, "stages", DESCRIBE),
    ],
    # Removes lost workers from their groups, for which Kafka requires Read.
    "heartbeats": [
        _one(TOPIC, HEARTBEATS.name, READ),
        _one(GROUP, "heartbeats", READ),
        *_topics(WRITE, of=(HEARTBEATS_REJECTED, *_OUTBOX)),
        _one(TOPIC, STAGE_RESULTS.name, DESCRIBE),
        _one(GROUP, "stages", DESCRIBE),
        _all(GROUP, _WORKERS, READ),
    ],
    "stages": [
        _one(TOPIC, STAGE_RESULTS.name, READ),
        _one(GROUP, "stages", READ),
        *_topics(WRITE, of=(STAGE_RESULTS_REJECTED, *_OUTBOX)),
    ],
    "callbacks": [
        *_topics(READ, WRITE, of=(CALLBACKS, CALLBACKS_DIVERTED)),
        _one(GROUP, "callbacks", READ),
        *_topics(
            WRITE, of=(CALLBACKS_RESULTS, CALLBACKS_DEAD, CALLBACKS_REJECTED, CALLBACKS_DIVERTED_REJECTED)
        ),
    ],
    # The worker SDK. `acls(types=…)` narrows it to some task types.
    "worker": [
        _all(TOPIC, _READY, READ),
        _all(GROUP, _WORKERS, READ),
        _one(TOPIC, REVOKED.name, READ),
        *_topics(WRITE, of=(HEARTBEATS, STAGE_RESULTS)),
    ],
    # An application that submits by Kafka.
    "producer": [_one(TOPIC, SUBMITTED.name, WRITE)],
    # An application that consumes events.
    "consumer": [
        *_topics(READ, of=(EVENTS, CALLBACKS_RESULTS, CALLBACKS_DEAD)),
        _all(GROUP, CONSUMERS, READ),
    ],
    # The verbs `topics` and `check`, also with --repair and --replace.
    "operator": [
        _all(TOPIC, "", READ, CREATE, ALTER, DESCRIBE_CONFIGS, ALTER_CONFIGS),
        _all(GROUP, "", DESCRIBE),
        *_topics(WRITE, of=(*_OUTBOX, CALLBACKS_DIVERTED, DEPLOYMENT, SUBMITTED)),
    ],
}

# The first to start binds the prefix to its database.
for _service in ("gateway", "task-sync", "heartbeats", "stages", "callbacks"):
    _BY_SERVICE[_service].append(_one(TOPIC, DEPLOYMENT.name, READ, WRITE))

SERVICES = tuple(_BY_SERVICE)


def acls(prefix: str, services: Iterable[str] = SERVICES, *, types: Iterable[str] = ()) -> list[AccessRule]:
    """The access rules of services in one deployment.

    Args:
        prefix: of its topics and groups.
        services: of `SERVICES`.
        types: task types that `worker` may run; none is all.
    """
    return [
        AccessRule(service, kind, prefix + name, pattern, operations)
        for service in services
        for kind, name, pattern, operations in _rules_of(service, list(types))
    ]


def _rules_of(service: str, types: list[str]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    for kind, name, pattern, operations in _BY_SERVICE[service]:
        if service == "worker" and types and pattern == PREFIXED:
            yield from ((kind, name + type_name, LITERAL, operations) for type_name in types)
        else:
            yield kind, name, pattern, operations


def commands(rules: Iterable[AccessRule], principal: str) -> list[str]:
    """The command lines of Kafka's own tool, without the arguments that reach the cluster.

    Args:
        rules: see `acls`.
        principal: of a service at the cluster, such as `User:penstock-{service}`.
    """
    return [
        shlex.join(
            [
                "kafka-acls.sh",
                "--add",
                "--allow-principal",
                principal.replace("{service}", rule.service),
                *(part for operation in rule.operations for part in ("--operation", operation)),
                f"--{rule.kind}",
                rule.name,
                "--resource-pattern-type",
                rule.pattern,
            ]
        )
        for rule in rules
    ]


def strimzi(rules: Iterable[AccessRule]) -> dict[str, Any]:
    """By service, the `authorization` of a Strimzi KafkaUser."""
    found: dict[str, Any] = {}
    for rule in rules:
        entry = found.setdefault(rule.service, {"authorization": {"type": "simple", "acls": []}})
        entry["authorization"]["acls"].append(rule.to_wire())
    return found
