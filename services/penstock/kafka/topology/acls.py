"""The access list of each service on Kafka, of which commands and manifests are printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.core.access import SEPARATOR
from penstock.kafka.topology import services as declared
from penstock.kafka.topology.rights import (
    ALTER,
    ALTER_CONFIGS,
    CREATE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    LITERAL,
    PREFIXED,
    READ,
    TOPIC,
    WRITE,
    Right,
    on_all,
    on_ready_topics,
    on_topics,
    on_workers_groups,
)
from penstock.kafka.topology.topics import (
    CALLBACKS_DEAD,
    CALLBACKS_DIVERTED,
    CALLBACKS_RESULTS,
    DEPLOYMENT,
    EVENTS,
    FLOW_EVENTS_SUBMITTED,
    FLOWS_SUBMITTED,
    HEARTBEATS,
    OUTBOX,
    REVOKED,
    STAGE_RESULTS,
    SUBMITTED,
    TASK_LOGS,
    WORKERS,
)

# The prefix, behind the deployment's, of groups that users' own consumers of events may use.
CONSUMERS = "consumers."


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


_BY_SERVICE: dict[str, tuple[Right, ...]] = {
    **{name: service.rights for name, service in declared.SERVICES.items()},
    # The worker SDK. `acls` narrows it to some task types or namespaces.
    "worker": (
        on_ready_topics(READ),
        on_workers_groups(READ),
        *on_topics(READ, of=[REVOKED]),
        *on_topics(WRITE, of=[HEARTBEATS, STAGE_RESULTS, TASK_LOGS, WORKERS]),
    ),
    # An application that submits by Kafka.
    "producer": on_topics(WRITE, of=[SUBMITTED, FLOWS_SUBMITTED, FLOW_EVENTS_SUBMITTED]),
    # An application that consumes events.
    "consumer": (
        *on_topics(READ, of=[EVENTS, CALLBACKS_RESULTS, CALLBACKS_DEAD]),
        on_all(GROUP, CONSUMERS, READ),
    ),
    # The verbs `topics` and `check`, also with --repair and --replace.
    "operator": (
        on_all(TOPIC, "", READ, CREATE, ALTER, DESCRIBE_CONFIGS, ALTER_CONFIGS),
        on_all(GROUP, "", DESCRIBE),
        *on_topics(WRITE, of=[*OUTBOX, CALLBACKS_DIVERTED, DEPLOYMENT, SUBMITTED, FLOWS_SUBMITTED]),
    ),
}

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
        AccessRule(service, right.kind, prefix + right.name, right.pattern, right.operations)
        for service in services
        for right in _rights_of(service, narrow)
    ]


def _rights_of(service: str, narrow: list[tuple[str, str]]) -> Iterator[Right]:
    for right in _BY_SERVICE[service]:
        if service == "worker" and narrow and right.pattern == PREFIXED:
            yield from (
                Right(right.kind, right.name + end, pattern, right.operations) for end, pattern in narrow
            )
        else:
            yield right


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
