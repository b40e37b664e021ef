"""The declaration of the topics: `schemas/topics.toml`, with the overrides of PENSTOCK_TOPICS_FILE.

It fails at the start: a file with an unknown key or a wrong value is refused as a whole, and the
error names each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.contracts.files import schemas_folder
from penstock.errors import SettingsError
from penstock.kafka.topology.topics import (
    CALLBACKS,
    CALLBACKS_DIVERTED,
    DAY_MS,
    DEPLOYMENT,
    PLATFORM,
    READY,
    REVOKED,
    WORKERS,
    Topic,
)
from penstock.settings import Kafka

# The cluster's default.
CLUSTER_DEFAULT = -1

# The broker sets the timestamps. With writers' timestamps it would refuse records from a clock that
# is an hour ahead, and would delete records by wrong times.
STAMP = "message.timestamp.type"
BY_BROKER = "LogAppendTime"

_MAX_PARTITIONS = 10_000
_FOREVER = -1
_KEYS = ("partitions", "replication", "min_insync_replicas", "retention_days", "cleanup", "config")
# Kafka's names of the settings that have a key here, or that the code sets.
_RESERVED = ("retention.ms", "cleanup.policy", "min.insync.replicas", "max.message.bytes", STAMP)
_KNOWN = {topic.name for topic in PLATFORM} | {READY}


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configuration of a topic.

    Attributes:
        partitions: how many.
        replication: copies of each partition; -1 is the cluster's default.
        configs: by Kafka's names.
    """

    partitions: int
    replication: int
    configs: Mapping[str, str]


def config_of(settings: Kafka, topic: Topic) -> TopicConfig:
    """The declared configuration of a topic; values of `topic` itself win.

    Raises:
        SettingsError: the declaration cannot be read, or is contradictory.
    """
    declared = _read(settings.topics_file)
    name = READY if topic.name.startswith(f"{READY}.") else topic.name
    values = {**declared["defaults"], **declared["topics"].get(name, {})}
    partitions = topic.partitions if topic.partitions is not None else values["partitions"]
    days = values.get("retention_days", _FOREVER)
    retention_ms = topic.retention_ms
    if retention_ms is None:
        retention_ms = _FOREVER if days == _FOREVER else int(days * DAY_MS)
    configs = {
        "retention.ms": str(retention_ms),
        "cleanup.policy": values["cleanup"],
        "max.message.bytes": str(topic.max_bytes),
        STAMP: BY_BROKER,
        **values.get("config", {}),
    }
    if "min_insync_replicas" in values:
        configs["min.insync.replicas"] = str(values["min_insync_replicas"])
    return TopicConfig(partitions, values.get("replication", CLUSTER_DEFAULT), configs)


def partitions_of(settings: Kafka, topic: Topic) -> int:
    """The declared number of partitions of a topic.

    Raises:
        SettingsError: as `config_of`.
    """
    return config_of(settings, topic).partitions


@cache
def _read(file: str) -> dict[str, Any]:
    declared = _parse(schemas_folder() / "topics.toml")
    if not file:
        return declared
    overrides = _parse(Path(file))
    problems = [f"{key}: no such table" for key in overrides if key not in ("defaults", "topics")]
    defaults, topics = overrides.get("defaults", {}), overrides.get("topics", {})
    if not isinstance(defaults, dict) or not isinstance(topics, dict):
        raise SettingsError(f"PENSTOCK_TOPICS_FILE={file}: defaults and topics must be tables")
    problems += [
        f"topics.{name}: no such topic; the topics are {', '.join(sorted(_KNOWN))}"
        for name in topics
        if name not in _KNOWN
    ]
    merged = {
        "defaults": {**declared["defaults"], **defaults},
        "topics": {
            name: _merge(declared["topics"][name], topics.get(name, {})) for name in declared["topics"]
        },
    }
    for name, table in {"defaults": defaults, **topics}.items():
        problems += _problems(f"topics.{name}" if table is not defaults else name, table)
    problems = problems or _contradictions(merged)
    if problems:
        raise SettingsError(f"PENSTOCK_TOPICS_FILE={file}: " + "; ".join(problems))
    return merged


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"PENSTOCK_TOPICS_FILE={file} cannot be read as TOML: {error}") from error


def _merge(declared: dict[str, Any], override: Any) -> dict[str, Any]:
    if not isinstance(override, dict):
        return declared
    merged = {**declared, **override}
    if isinstance(override.get("config"), dict):
        merged["config"] = {str(name): _kafka_text(value) for name, value in override["config"].items()}
    return merged


def _kafka_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _problems(where: str, table: Any) -> list[str]:
    """The faults of one table."""
    if not isinstance(table, dict):
        return [f"{where} must be a table"]
    found = [
        f"{where}.{key}: no such key; the keys are {', '.join(_KEYS)}" for key in table if key not in _KEYS
    ]
    bounds = {"partitions": _MAX_PARTITIONS, "replication": 32_767, "min_insync_replicas": 32_767}
    for key, most in bounds.items():
        value = table.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            found.append(f"{where}.{key}={value!r} must be a whole number from 1 to {most}")
    days = table.get("retention_days", 1)
    if (
        not isinstance(days, int | float)
        or isinstance(days, bool)
        or not (days == _FOREVER or 0 < days <= 36_500)
    ):
        found.append(
            f"{where}.retention_days={days!r} must be a number above 0 and at most 36500, or -1 for no limit"
        )
    if table.get("cleanup", "delete") != "delete":
        found.append(
            f"{where}.cleanup={table['cleanup']!r} must be 'delete': records with the same key are not versions of one object, "
            "so compaction would lose tasks"
        )
    if where in ("defaults", f"topics.{READY}") and "partitions" in table:
        found.append(f"{where}.partitions: each topic, and each task type, sets its own number")
    config = table.get("config", {})
    if not isinstance(config, dict) or (where == "defaults" and config):
        found.append(f"{where}.config must be a table, and is allowed for a topic only")
    else:
        found += [
            f"{where}.config: {name} has a key of its own, or is fixed"
            for name in config
            if name in _RESERVED
        ]
    return found


def _contradictions(merged: dict[str, Any]) -> list[str]:
    """The contradictions between tables."""
    topics = {name: {**merged["defaults"], **table} for name, table in merged["topics"].items()}
    found = [
        f"topics.{name}: min_insync_replicas={table['min_insync_replicas']} is above replication={table['replication']}, so "
        "nothing could be written"
        for name, table in topics.items()
        if table.get("min_insync_replicas", 1) > table.get("replication", 32_767)
    ]
    normal, diverted = (topics[topic.name]["partitions"] for topic in (CALLBACKS, CALLBACKS_DIVERTED))
    if normal != diverted:
        found.append(
            f"topics.{CALLBACKS.name} has {normal} partitions and topics.{CALLBACKS_DIVERTED.name} {diverted}: the numbers must "
            "be equal, because a target is on the same partition of both"
        )
    found += [
        f"topics.{topic.name}.partitions must be 1: {topic.fixed}"
        for topic in (REVOKED, WORKERS, DEPLOYMENT)
        if topics[topic.name]["partitions"] != 1
    ]
    return found
