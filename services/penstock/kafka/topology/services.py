"""The services, each named once: what differs between them outside their own folders.

The access lists, `penstock run`, `penstock up`, `penstock check` and the tests are made from this
table. `tests/contract/test_services.py` names each file of a deployment that lacks a service. The
table is in this layer, because rights name topics, and it imports no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.kafka.topology.rights import (
    CREATE,
    DELETE,
    DESCRIBE,
    READ,
    WRITE,
    Right,
    on_group,
    on_ready_topics,
    on_topics,
    on_workers_groups,
)
from penstock.kafka.topology.topics import (
    CALLBACKS,
    CALLBACKS_DEAD,
    CALLBACKS_DIVERTED,
    CALLBACKS_DIVERTED_REJECTED,
    CALLBACKS_REJECTED,
    CALLBACKS_RESULTS,
    DEPLOYMENT,
    FLOW_EVENTS_SUBMITTED,
    FLOW_EVENTS_SUBMITTED_REJECTED,
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
    HEARTBEATS,
    HEARTBEATS_REJECTED,
    OUTBOX,
    STAGE_RESULTS,
    STAGE_RESULTS_REJECTED,
    SUBMITTED,
    SUBMITTED_REJECTED,
    TASK_LOGS,
    TASK_LOGS_REJECTED,
    WORKERS,
    Topic,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service.

    Attributes:
        package: its package in `penstock`.
        stop_order: `penstock up` stops services with the lowest order first.
        groups: the topics that each of its consumer groups reads, by group without the prefix.
        ingests: whether the positions in these topics are in PostgreSQL, instead of in Kafka.
        writes: topics that it writes to.
        also: its further rights.
        objects: whether it uses the object store.
    """

    package: str
    stop_order: int
    groups: Mapping[str, tuple[Topic, ...]] = field(default_factory=dict)
    ingests: bool = False
    writes: tuple[Topic, ...] = ()
    also: tuple[Right, ...] = ()
    objects: bool = False

    @property
    def reads(self) -> tuple[Topic, ...]:
        """The topics that its groups read."""
        return tuple(topic for topics in self.groups.values() for topic in topics)

    @property
    def rights(self) -> tuple[Right, ...]:
        """Its rights on Kafka, in the order in which they are printed."""
        both = [topic for topic in self.reads if topic in self.writes]
        return (
            *on_topics(READ, WRITE, of=both),
            *on_topics(READ, of=[topic for topic in self.reads if topic not in both]),
            *(on_group(group, READ) for group in self.groups),
            *on_topics(WRITE, of=[topic for topic in self.writes if topic not in both]),
            *self.also,
            # The first service to start binds the prefix to its database.
            *on_topics(READ, WRITE, of=[DEPLOYMENT]),
        )


# In the order in which commands and pages list them. Services that accept work stop first, so that
# the others can finish it.
SERVICES: Mapping[str, Service] = {
    # Publishes events of cancellations, writes for workers without Kafka, explains why a task
    # waits, and shows workers and the newest lines of task logs.
    "gateway": Service(
        package="gateway",
        stop_order=0,
        writes=(HEARTBEATS, STAGE_RESULTS, *OUTBOX),
        also=(
            *on_topics(READ, WRITE, of=[TASK_LOGS, WORKERS]),
            on_ready_topics(READ, CREATE),
            on_workers_groups(READ),
        ),
        objects=True,
    ),
    # Ingests, releases, and searches for lost records; it writes a marker where no record is left
    # to read. It reads and deletes records that it withdraws from busy workers.
    "task-sync": Service(
        package="task_sync",
        stop_order=0,
        groups={"task-sync": (SUBMITTED,)},
        ingests=True,
        writes=(SUBMITTED_REJECTED, HEARTBEATS, STAGE_RESULTS),
        also=(
            on_ready_topics(READ, WRITE, CREATE, DELETE),
            on_workers_groups(DESCRIBE),
            on_group("heartbeats", DESCRIBE),
            on_group("stages", DESCRIBE),
        ),
        objects=True,
    ),
    # Removes lost workers from their groups, for which Kafka requires Read.
    "heartbeats": Service(
        package="heartbeats",
        stop_order=1,
        groups={"heartbeats": (HEARTBEATS,)},
        writes=(HEARTBEATS_REJECTED, *OUTBOX),
        also=(
            *on_topics(DESCRIBE, of=[STAGE_RESULTS]),
            on_group("stages", DESCRIBE),
            on_workers_groups(READ),
        ),
    ),
    "stages": Service(
        package="stages",
        stop_order=2,
        groups={"stages": (STAGE_RESULTS,)},
        writes=(STAGE_RESULTS_REJECTED, *OUTBOX),
    ),
    # Advances flows; ingests flows and the events that they wait for.
    "flows": Service(
        package="flow_owner",
        stop_order=3,
        groups={"flows": (FLOWS_SUBMITTED,), "flow-events": (FLOW_EVENTS_SUBMITTED,)},
        ingests=True,
        writes=(FLOWS_SUBMITTED_REJECTED, FLOW_EVENTS_SUBMITTED_REJECTED, *OUTBOX),
        objects=True,
    ),
    "callbacks": Service(
        package="callbacks",
        stop_order=4,
        groups={"callbacks": (CALLBACKS, CALLBACKS_DIVERTED)},
        writes=(
            CALLBACKS,
            CALLBACKS_DIVERTED,
            CALLBACKS_RESULTS,
            CALLBACKS_DEAD,
            CALLBACKS_REJECTED,
            CALLBACKS_DIVERTED_REJECTED,
        ),
    ),
    # Stores lines of task logs.
    "tasklogs": Service(
        package="task_logs",
        stop_order=4,
        groups={"tasklogs": (TASK_LOGS,)},
        ingests=True,
        writes=(TASK_LOGS_REJECTED,),
        objects=True,
    ),
}

# The topics whose positions are in PostgreSQL, with the service that reads each.
INGESTED = tuple(
    (topic, name) for name, service in SERVICES.items() if service.ingests for topic in service.reads
)

# The groups whose positions are in Kafka, with the service and its topics.
PROCESSING_GROUPS = tuple(
    (group, name, topics)
    for name, service in SERVICES.items()
    if not service.ingests
    for group, topics in service.groups.items()
)
