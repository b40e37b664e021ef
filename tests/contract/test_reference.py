"""docs/reference.md names every setting, topic, state and error, as the code has them.

PENSTOCK_WRITE_DOCS=1 pytest tests/contract/test_reference.py    renews it.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest

import penstock.cli
from penstock import errors, metrics
from penstock.callbacks.settings import CallbacksSettings
from penstock.core.completion import Outcome
from penstock.core.task import FINAL, State
from penstock.gateway.settings import GatewaySettings
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.declared import figures
from penstock.kafka.processor import ProcessorSettings
from penstock.kafka.topics import PLATFORM, ready
from penstock.process import exit_status
from penstock.settings import ENVIRONMENT_PREFIX, Kafka, Platform
from penstock.stages.settings import StagesSettings
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker.settings import WorkerSettings

FILE = Path(__file__).parents[2] / "docs" / "reference.md"
GROUPS = {
    "All services and workers": (Kafka, None),
    "All services": (Platform, Kafka),
    "gateway": (GatewaySettings, Platform),
    "task-sync": (TaskSyncSettings, Platform),
    "heartbeats, stages, callbacks": (ProcessorSettings, Kafka),
    "heartbeats": (HeartbeatsSettings, ProcessorSettings),
    "stages": (StagesSettings, ProcessorSettings),
    "callbacks": (CallbacksSettings, ProcessorSettings),
    "worker": (WorkerSettings, Kafka),
}
OUTCOMES = {
    Outcome.NEXT: "`Next(stage, context, delay_s=)`: another stage, attempt 0",
    Outcome.DONE: "`Done(result)`: the task has succeeded",
    Outcome.FAIL: "`Fail(reason, permanent=)`, or an exception: again by policy, then failed",
    Outcome.RETRY: "`RetryAfter(delay_s, reason)`: the same stage again, not counted",
    Outcome.EXPIRED: "the worker was silent for its lease: again by policy, then failed",
}


def settings_tables() -> str:
    parts = []
    for name, (kind, base) in GROUPS.items():
        known = {field.name for field in dataclasses.fields(base)} if base else set()
        if kind not in (Kafka, Platform):
            known |= {field.name for field in dataclasses.fields(Platform)}
        rows = [
            f"| `{ENVIRONMENT_PREFIX}{field.name.upper()}` | `{shown(field.default)}` | {field.metadata['doc']} |"
            for field in dataclasses.fields(kind)
            if field.name not in known
        ]
        parts.append(
            "\n".join(
                [f"### {name}", "", "| variable | default | what it is |", "| --- | --- | --- |", *rows]
            )
        )
    return "\n\n".join(parts)


def shown(default: object) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default)


def error_table() -> str:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
    ]
    return "\n".join(
        f"| `{kind.__name__}` | {exit_status(kind('x'))} | {(kind.__doc__ or '').splitlines()[0]} |"
        for kind in kinds
    )


def metric_table() -> str:
    return "\n".join(
        f"| `{metric.name}` ({metric.kind}) | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.doc} |"
        for metric in metrics.ALL
    )


def status_table() -> str:
    rows = re.findall(r"^    (\d+) +(.+)$", penstock.cli.__doc__ or "", flags=re.MULTILINE)
    return "\n".join(f"| {status} | {text} |" for status, text in rows)


def document() -> str:
    topics = "\n".join(
        f"| `{topic.name}` | {as_declared.partitions or 'its type says'} | {int(as_declared.configs['retention.ms']) // 86_400_000} days | {topic.doc} |"
        for topic in (*PLATFORM, ready("TYPE", 0))
        for as_declared in (figures(Kafka(), topic),)
    )
    states = ", ".join(f"`{state}`" for state in State if state not in FINAL)
    finals = ", ".join(f"`{state}`" for state in State if state in FINAL)
    outcomes = "\n".join(f"| `{outcome}` | {text} |" for outcome, text in OUTCOMES.items())
    return f"""# Reference

Made from the code by `tests/contract/test_reference.py`, which fails when it is out of date.

## Settings

Every setting is an environment variable; a keyword or an option on the command line wins over it.

{settings_tables()}

`PENSTOCK_LOG_LEVEL` (INFO) and `PENSTOCK_LIBRARY_LOG_LEVEL` (CRITICAL) choose what is logged, on standard error;
`PENSTOCK_LOG_FORMAT` is `text` or `json` (one object a line).
`PENSTOCK_GATEWAY` is the gateway's address for clients and the command line.

`PENSTOCK_DATA_DIR` names the data directory of a `penstock up` (`--data-dir` does so for one verb); left out, it is `.penstock` in
the directory where a program is started. A worker or service that is told none of `PENSTOCK_KAFKA`, `PENSTOCK_POSTGRES`,
`PENSTOCK_PREFIX` and `PENSTOCK_OBJECTS` takes all of them from the deployment that runs there. A verb takes each from its option, or
from `--data-dir`, or from the environment, or from the deployment that runs there, whichever comes first.

## Topics

Names stand behind the deployment's prefix (`penstock.`). Contracts: [asyncapi.json](../schemas/messages/asyncapi.json).

| topic | partitions | kept | what is on it |
| --- | --- | --- | --- |
{topics}

## States

Open: {states}. Final: {finals}. The transitions are drawn in [ARCHITECTURE.md](../ARCHITECTURE.md).

## Outcomes

| outcome | what a handler does, and what comes of it |
| --- | --- |
{outcomes}

## Errors

The status is that of a process which an error ends: a verb, a service or a worker.

| error | status | meaning |
| --- | --- | --- |
{error_table()}

## Metrics

Served as `http://PENSTOCK_METRICS_HOST:PENSTOCK_METRICS_PORT/metrics` by each process of every service, for Prometheus; they tell of that
process alone, with what the system knows of it (`process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_open_fds`, `process_start_time_seconds` and others). `/livez` beside it answers 200 while the process works, `/readyz` 200 once it has
what it needs, else 503 with `{{"status": "not ready", "checks": {{NAME: REASON}}}}`. Under `penstock up` the first process (the gateway) has that port and each further one, in the
order of its log, the next. What all processes have in PostgreSQL is told by `penstock targets`.

| metric | labels | what it is |
| --- | --- | --- |
{metric_table()}

## HTTP

[openapi.json](../schemas/http/openapi.json), shown by every gateway at `/docs`. Errors are `application/problem+json` (RFC 9457)
with `errors: [{{pointer, detail}}]`.

## Command line

`penstock --help` and `penstock VERB --help`. Exit statuses, also of services and workers:

| status | meaning |
| --- | --- |
{status_table()}
"""


def test_the_reference_is_what_the_code_says():
    """Habit 8: settings, topics, states and errors all appear in the docs, and a test says so."""
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        FILE.write_text(document())
    assert FILE.read_text() == document()


@pytest.mark.parametrize("kind", [kind for kind, _base in GROUPS.values()])
def test_every_setting_explains_itself(kind):
    """A setting without a sentence is one nobody can choose."""
    for field in dataclasses.fields(kind):
        assert len(field.metadata["doc"]) > 15, field.name
