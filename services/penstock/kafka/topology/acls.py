"""The access list of each service on Kafka, of which commands and manifests are printed.

Read and Write include Describe. An idempotent producer needs only Write on its topics.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.core.access import SEPARATOR
from penstock.kafka.topology.topics import (
    CALLBACKS,
    CALLBACKS_DEAD,
    CALLBACKS_DIVERTED,
    CALLBACKS_DIVERTED_REJECTED,
    CALLBACKS_REJECTED,
    CALLBACKS_RESULTS,
    DEPLOYMENT,
    EVENTS,
    FLOW_EVENTS_SUBMITTED,
    FLOW_EVENTS_SUBMITTED_REJECTED,
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
    HEARTBEATS,
    HEARTBEATS_REJECTED,
    READY,
    REVOKED,
    STAGE_RESULTS,
    STAGE_RESULTS_REJECTED,
    SUBMITTED,
    SUBMITTED_REJECTED,
    TASK_LOGS,
    TASK_LOGS_REJECTED,
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
    # Publishes events of cancellations, writes for workers without Kafka, explains why a task
    # waits, and shows the newest lines of task logs.
    "gateway": [
        *_topics(WRITE, of=(HEARTBEATS, STAGE_RESULTS, *_OUTBOX)),
        *_topics(READ, WRITE, of=(TASK_LOGS,)),
        _all(TOPIC, _READY, READ, CREATE),
        _all(GROUP, _WORKERS, READ),
    ],
    # Ingests, releases, and searches for lost records; it writes a marker where no record is left
    # to read. It reads and deletes records that it withdraws from busy workers.
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
    # Advances flows; ingests flows and the events that they wait for.
    "flows": [
        *_topics(READ, of=(FLOWS_SUBMITTED, FLOW_EVENTS_SUBMITTED)),
        _one(GROUP, "flows", READ),
        _one(GROUP, "flow-events", READ),
        *_topics(WRITE, of=(FLOWS_SUBMITTED_REJECTED, FLOW_EVENTS_SUBMITTED_REJECTED, *_OUTBOX)),
    ],
    "callbacks": [
        *_topics(READ, WRITE, of=(CALLBACKS, CALLBACKS_DIVERTED)),
        _one(GROUP, "callbacks", READ),
        *_topics(
            WRITE, of=(CALLBACKS_RESULTS, CALLBACKS_DEAD, CALLBACKS_REJECTED, CALLBACKS_DIVERTED_REJECTED)
        ),
    ],
    # Stores lines of task logs.
    "tasklogs": [
        _one(TOPIC, TASK_LOGS.name, READ),
        _one(GROUP, "tasklogs", READ),
        *_topics(WRITE, of=(TASK_LOGS_REJECTED,)),
    ],
    # The worker SDK. `acls` narrows it to some task types or namespaces.
    "worker": [
        _all(TOPIC, _READY, READ),
        _all(GROUP, _WORKERS, READ),
        _one(TOPIC, REVOKED.name, READ),
        *_topics(WRITE, of=(HEARTBEATS, STAGE_RESULTS, TASK_LOGS)),
    ],
    # An application that submits by Kafka.
    "producer": _topics(WRITE, of=(SUBMITTED, FLOWS_SUBMITTED, FLOW_EVENTS_SUBMITTED)),
    # An application that consumes events.
    "consumer": [
        *_topics(READ, of=(EVENTS, CALLBACKS_RESULTS, CALLBACKS_DEAD)),
        _all(GROUP, CONSUMERS, READ),
    ],
    # The verbs `topics` and `check`, also with --repair and --replace.
    "operator": [
        _all(TOPIC, "", READ, CREATE, ALTER, DESCRIBE_CONFIGS, ALTER_CONFIGS),
        _all(GROUP, "", DESCRIBE),
        *_topics(WRITE, of=(*_OUTBOX, CALLBACKS_DIVERTED, DEPLOYMENT, SUBMITTED, FLOWS_SUBMITTED)),
    ],
}

# The first to start binds the prefix to its database.
for _service in ("gateway", "task-sync", "heartbeats", "stages", "flows", "callbacks", "tasklogs"):
    _BY_SERVICE[_service].append(_one(TOPIC, DEPLOYMENT.name, READ, WRITE))

SERVICES = tuple(_BY_SERVICE)


def acls(
    prefix: str,
    services: Iterable[str] = SERVICES,
    *,
    types: Iterable[str] = (),
    namespaces: Iterable[str] = (),
) -> list[AccessRule]:
    """The access rules of services in one deployment.

    Args:
        prefix: of its topics and groups.
        services: of `SERVICES`.
        types: task types that `worker` may run.
        namespaces: namespaces whose types `worker` may run too, without the default one, whose
            types have no common beginning. Neither types nor namespaces is all types.
    """
    narrow = [
        *((type_name, LITERAL) for type_name in types),
        *((namespace + SEPARATOR, PREFIXED) for namespace in namespaces),
    ]
    return [
        AccessRule(service, kind, prefix + name, pattern, operations)
        for service in services
        for kind, name, pattern, operations in _rules_of(service, narrow)
    ]


def _rules_of(service: str, narrow: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    for kind, name, pattern, operations in _BY_SERVICE[service]:
        if service == "worker" and narrow and pattern == PREFIXED:
            yield from ((kind, name + end, narrow_pattern, operations) for end, narrow_pattern in narrow)
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
