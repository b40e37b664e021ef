"""What the benchmark starts for each peer. The module of a peer says why it is set up so."""

from __future__ import annotations

import sys
from dataclasses import dataclass

PYTHON = (sys.executable, "-m")


@dataclass(frozen=True)
class Peer:
    """A system that is measured.

    Attributes:
        name: name in the tables.
        module: module below `benchmarks.peers` with `prepare` and `submitter`.
        servers: servers that it needs: `redis`, `kafka`, `postgres`, or `penstock` for all of a
            Penstock deployment.
        worker: command of its worker.
        ended: statement that returns number and end (seconds since 1970) of each finished task
            from the peer's own records; empty where it keeps none, and the end of the last handler
            counts.
        waiting: statement that counts the tasks that the peer keeps and has not finished, or a key
            in Redis (see `Running.waiting`); empty where nothing tells it.
    """

    name: str
    module: str
    servers: tuple[str, ...]
    worker: tuple[str, ...]
    ended: str = ""
    waiting: str = ""


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (*PYTHON, f"benchmarks.peers.{name}", *arguments)


_TABLE_ENDED = """SELECT (convert_from(context, 'UTF8')::jsonb ->> 'n')::int, extract(epoch FROM finished_at)::float8
    FROM job WHERE state = 'succeeded'"""
_PENSTOCK_ENDED = """SELECT (convert_from(result, 'UTF8')::jsonb ->> 'n')::int, extract(epoch FROM finished_at)::float8
    FROM penstock.task WHERE state = 'succeeded'"""
_PROCRASTINATE_ENDED = """SELECT (j.args -> 'context' ->> 'n')::int, extract(epoch FROM e.at)::float8
    FROM procrastinate_events e JOIN procrastinate_jobs j ON j.id = e.job_id
    WHERE j.task_name = 'three' AND e.type = 'succeeded'"""
_DBOS_ENDED = """SELECT substr(workflow_uuid, 3)::int, completed_at / 1000.0::float8
    FROM dbos.workflow_status WHERE status = 'SUCCESS' AND workflow_uuid ~ '^n_-?[0-9]+$'"""
_FLOW_ENDED = """SELECT (labels ->> 'n')::int, extract(epoch FROM finished_at)::float8
    FROM penstock.flow WHERE status = 'succeeded' AND parent_id IS NULL"""

_PENSTOCK_WAITING = "SELECT count(*) FROM penstock.task WHERE finished_at IS NULL"
_TABLE_WAITING = "SELECT count(*) FROM job WHERE state <> 'succeeded'"
_PROCRASTINATE_WAITING = """SELECT count(*) FROM procrastinate_jobs
    WHERE status IN ('todo', 'doing') AND task_name <> 'retry'"""
_DBOS_WAITING = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"

_TASKIQ = (*PYTHON, "taskiq", "worker", "--workers", "1", "--log-level", "ERROR")
_CELERY = ("worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "ERROR", "--without-gossip",
           "--without-mingle", "--without-heartbeat")  # fmt: skip

PEERS = (
    Peer(
        "Penstock, topic", "penstock_topic", ("penstock",), _module("penstock_worker"),
        _PENSTOCK_ENDED, _PENSTOCK_WAITING,
    ),
    Peer(
        "Penstock, HTTP", "penstock_http", ("penstock",), _module("penstock_worker"),
        _PENSTOCK_ENDED, _PENSTOCK_WAITING,
    ),
    Peer(
        "table, in batches", "table", ("postgres",), _module("table", "--batch", "500"),
        _TABLE_ENDED, _TABLE_WAITING,
    ),
    Peer(
        "table, a task at a time", "table", ("postgres",), _module("table", "--loops", "8"),
        _TABLE_ENDED, _TABLE_WAITING,
    ),
    Peer(
        "Celery on Redis", "celery_chain", ("redis",),
        (*PYTHON, "celery", "--app", "benchmarks.peers.celery_chain", "--quiet", *_CELERY),
        waiting="celery",
    ),
    Peer(
        "taskiq on Redis", "taskiq_streams", ("redis",), (*_TASKIQ, "benchmarks.peers.taskiq_streams:broker"),
        waiting="taskiq",
    ),
    Peer("taskiq on Kafka", "taskiq_topic", ("kafka",), (*_TASKIQ, "benchmarks.peers.taskiq_topic:broker")),
    Peer(
        "Procrastinate", "procrastinate_jobs", ("postgres",), _module("procrastinate_jobs"),
        _PROCRASTINATE_ENDED, _PROCRASTINATE_WAITING,
    ),
    Peer("DBOS", "dbos_workflow", ("postgres",), _module("dbos_workflow"), _DBOS_ENDED, _DBOS_WAITING),
)  # fmt: skip

FLOW_PEERS = (
    Peer("Penstock", "flows_penstock", ("penstock",), _module("flows_penstock"), _FLOW_ENDED),
    Peer(
        "Celery's canvas", "flows_celery", ("redis",),
        (*PYTHON, "celery", "--app", "benchmarks.peers.flows_celery", "--quiet", *_CELERY),
    ),
    Peer("DBOS", "flows_dbos", ("postgres",), _module("flows_dbos"), _DBOS_ENDED),
)  # fmt: skip
