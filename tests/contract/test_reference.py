"""docs/reference.md lists every setting, topic, state, error and metric of the code.

PENSTOCK_WRITE_DOCS=1 pytest tests/contract/test_reference.py    regenerates it.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from tests.support.service_apps import settings_of

import penstock.cli
from penstock import errors, metrics
from penstock.core.completion import Outcome
from penstock.core.task import FINAL, State
from penstock.kafka.processing.processor import ProcessorSettings
from penstock.kafka.topology.services import SERVICES
from penstock.kafka.topology.topic_config import TopicConfig, config_of
from penstock.kafka.topology.topics import PLATFORM, ready
from penstock.process import exit_status
from penstock.settings import ENVIRONMENT_PREFIX, Kafka, Platform
from penstock.worker.settings import WorkerSettings

FILE = Path(__file__).parents[2] / "docs" / "reference.md"
PROCESSORS = [name for name in SERVICES if issubclass(settings_of(name), ProcessorSettings)]
GROUPS = {
    "All services and workers": (Kafka, None),
    "All services": (Platform, Kafka),
    ", ".join(PROCESSORS): (ProcessorSettings, Kafka),
    **{name: (settings_of(name), ProcessorSettings if name in PROCESSORS else Platform) for name in SERVICES},
    "worker": (WorkerSettings, Kafka),
}
OUTCOMES = {
    Outcome.NEXT: "`Next(stage, context, delay_s=)`: the task continues with another stage, attempt 0",
    Outcome.DONE: "`Done(result)`: the task has succeeded",
    Outcome.FAIL: "`Fail(reason, permanent=)`, or an exception: tried again by the type's policy, then failed",
    Outcome.RETRY: "`RetryAfter(delay_s, reason)`: the same stage again; not counted as a failure",
    Outcome.HANDED_BACK: "a worker stops, is full, has no handler, or cannot read the context: the same stage again; not counted as a failure",
    Outcome.SPAWN: "`Spawn(children, then, context=)`: the task waits for its children, then the stage `then`",
    Outcome.WAIT: "`Wait(event, then, context=)`: the task waits for an event, then the stage `then`",
    Outcome.EXPIRED: "the lease expired: tried again by the type's policy, then failed or quarantined",
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
            "\n".join([f"### {name}", "", "| variable | default | meaning |", "| --- | --- | --- |", *rows])
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
        f"| `{kind.__name__}` | {exit_status(kind.__new__(kind))} | {(kind.__doc__ or '').splitlines()[0]} |"
        for kind in kinds
    )


def metric_table() -> str:
    return "\n".join(
        f"| `{metric.name}` ({metric.kind}) | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.doc} |"
        for metric in metrics.ALL
    )


def status_table() -> str:
    # The text of a status may go on in lines that are indented further.
    found = re.findall(r"^    (\d+) +(.+(?:\n {9}.+)*)$", penstock.cli.__doc__ or "", flags=re.MULTILINE)
    rows = [(status, " ".join(text.split())) for status, text in found]
    return "\n".join(f"| {status} | {text} |" for status, text in rows)


def kept(config: TopicConfig) -> str:
    hours = int(config.configs["retention.ms"]) // 3_600_000
    if hours < 0:
        return "without limit"
    return f"{hours // 24} days" if hours >= 24 else f"{hours} h"


def document() -> str:
    topics = "\n".join(
        f"| `{topic.name}` | {as_declared.partitions or 'set by its type'} | {kept(as_declared)} | {topic.doc} |"
        for topic in (*PLATFORM, ready("TYPE", 0))
        for as_declared in (config_of(Kafka(), topic),)
    )
    states = ", ".join(f"`{state}`" for state in State if state not in FINAL)
    finals = ", ".join(f"`{state}`" for state in State if state in FINAL)
    outcomes = "\n".join(f"| `{outcome}` | {text} |" for outcome, text in OUTCOMES.items())
    return f"""# Reference

`tests/contract/test_reference.py` makes this page from the code, and fails when it is out of date.

## Settings

Each setting is an environment variable. A keyword argument or an option on the command line wins over it.

{settings_tables()}

### Logs, addresses, data directory

| variable | meaning |
| --- | --- |
| `PENSTOCK_LOG_LEVEL` | level of Penstock's log on standard error; `INFO` by default |
| `PENSTOCK_LIBRARY_LOG_LEVEL` | the same for client libraries; `CRITICAL` by default |
| `PENSTOCK_LOG_FORMAT` | `text` or `json` (one object a line) |
| `PENSTOCK_GATEWAY` | the gateway's address for clients and the command line |
| `PENSTOCK_DATA_DIR` | data directory of a `penstock up`; by default `.penstock` in the directory where the program starts |
| `PENSTOCK_PASSWORD_SERVICE` | password of one service, for `penstock roles login` and `penstock topics grant`; `PENSTOCK_PASSWORD_TASK_SYNC` and so on, `OWNER` and `READER` too |

A worker or service without `PENSTOCK_KAFKA`, `PENSTOCK_POSTGRES`, `PENSTOCK_PREFIX` and `PENSTOCK_OBJECTS` takes all of them from the
deployment of the data directory. A command takes each from its option, else from `--data-dir`, else from the environment, else from
the deployment of the data directory.

## Topics

Each name follows the deployment's prefix (`penstock.`). The contracts are in [asyncapi.json](../schemas/messages/asyncapi.json).

| topic | partitions | kept | content |
| --- | --- | --- | --- |
{topics}

## States

Unfinished: {states}. Final: {finals}. [ARCHITECTURE.md](../ARCHITECTURE.md#states-of-a-task) draws the transitions.

## Outcomes

| outcome | returned by, and effect |
| --- | --- |
{outcomes}

## Errors

The status is that of a command, service or worker that the error ends.

| error | status | meaning |
| --- | --- | --- |
{error_table()}

## Metrics

Each process of every service serves `http://PENSTOCK_METRICS_HOST:PENSTOCK_METRICS_PORT/metrics` for Prometheus. The metrics describe that process
alone, and include the standard ones of a process (`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`,
`process_start_time_seconds` and others). `penstock targets` shows the state of targets over all processes.

`/livez` answers 200 while the process works. `/readyz` answers 200 once it has what it needs, else 503 with
`{{"status": "not ready", "checks": {{NAME: REASON}}}}`. Under `penstock up` the gateway has that port, and each further process of its log the next one.

| metric | labels | meaning |
| --- | --- | --- |
{metric_table()}

## HTTP

`schemas/http/openapi` describes the API, in one file for each tag and [shared.json](../schemas/http/openapi/shared.json). Every gateway
shows it at `/docs`, and serves it as one document at `/openapi.json`. Errors are `application/problem+json` (RFC 9457) with
`errors: [{{pointer, detail}}]`.

## Command line

[The command line](reference/cli.md) has all commands. Exit statuses of commands, services and workers:

| status | meaning |
| --- | --- |
{status_table()}
"""


def test_the_reference_is_what_the_code_says():
    """O14: settings, topics, states, errors and metrics appear in the docs."""
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        FILE.write_text(document())
    assert FILE.read_text() == document()


@pytest.mark.parametrize("kind", [kind for kind, _base in GROUPS.values()])
def test_every_setting_has_a_description(kind):
    """Operators choose values by the description."""
    for field in dataclasses.fields(kind):
        assert len(field.metadata["doc"]) > 15, field.name
