"""The declaration of the topics: `schemas/topics.toml`, and what the file of PENSTOCK_TOPICS_FILE says otherwise.

Fails at the start: a file with anything in it that is not understood is refused whole, by name.
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
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED, DAY_MS, PLATFORM, READY, REVOKED, Topic
from penstock.settings import Kafka

# Of the cluster.
ITS_OWN = -1

_MOST_PARTITIONS = 10_000
_FOREVER = -1
_KEYS = ("partitions", "replication", "min_insync_replicas", "retention_days", "cleanup", "config")
# Kafka's own names of what has a key here, or is settled by the code.
_SPOKEN_FOR = ("retention.ms", "cleanup.policy", "min.insync.replicas", "max.message.bytes")
_KNOWN = {topic.name for topic in PLATFORM} | {READY}


@dataclass(frozen=True, slots=True)
class Figures:
    """How a topic is to be.

    Attributes:
        partitions: how many.
        replication: copies of each partition; -1 is the cluster's default.
        configs: by Kafka's own names.
    """

    partitions: int
    replication: int
    configs: Mapping[str, str]


def figures(settings: Kafka, topic: Topic) -> Figures:
    """How a topic is declared; what it says itself wins.

    Raises:
        SettingsError: the declaration cannot be read, or makes no sense.
    """
    declared = _read(settings.topics_file)
    name = READY if topic.name.startswith(f"{READY}.") else topic.name
    said = {**declared["defaults"], **declared["topics"].get(name, {})}
    partitions = topic.partitions if topic.partitions is not None else said["partitions"]
    days = said.get("retention_days", _FOREVER)
    retention_ms = topic.retention_ms
    if retention_ms is None:
        retention_ms = _FOREVER if days == _FOREVER else int(days * DAY_MS)
    configs = {
        "retention.ms": str(retention_ms),
        "cleanup.policy": said["cleanup"],
        "max.message.bytes": str(topic.max_bytes),
        **said.get("config", {}),
    }
    if "min_insync_replicas" in said:
        configs["min.insync.replicas"] = str(said["min_insync_replicas"])
    return Figures(partitions, said.get("replication", ITS_OWN), configs)


def partitions_of(settings: Kafka, topic: Topic) -> int:
    """How many partitions a topic is declared with.

    Raises:
        SettingsError: as `figures`.
    """
    return figures(settings, topic).partitions


@cache
def _read(file: str) -> dict[str, Any]:
    declared = _parse(schemas_folder() / "topics.toml")
    if not file:
        return declared
    over = _parse(Path(file))
    problems = [f"{key}: no such table" for key in over if key not in ("defaults", "topics")]
    defaults, topics = over.get("defaults", {}), over.get("topics", {})
    if not isinstance(defaults, dict) or not isinstance(topics, dict):
        raise SettingsError(f"topics_file={file}: defaults and topics must be tables")
    problems += [
        f"topics.{name}: there is no such topic; known are {', '.join(sorted(_KNOWN))}"
        for name in topics
        if name not in _KNOWN
    ]
    merged = {
        "defaults": {**declared["defaults"], **defaults},
        "topics": {
            name: _over(declared["topics"][name], topics.get(name, {})) for name in declared["topics"]
        },
    }
    for name, said in {"defaults": defaults, **topics}.items():
        problems += _problems(f"topics.{name}" if said is not defaults else name, said)
    problems = problems or _contradictions(merged)
    if problems:
        raise SettingsError(f"topics_file={file}: " + "; ".join(problems))
    return merged


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"topics_file={file} cannot be read as TOML: {error}") from error


def _over(below: dict[str, Any], above: Any) -> dict[str, Any]:
    if not isinstance(above, dict):
        return below
    found = {**below, **above}
    if isinstance(above.get("config"), dict):
        found["config"] = {str(name): _plain(value) for name, value in above["config"].items()}
    return found


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _problems(where: str, said: Any) -> list[str]:
    """What of one table is not understood."""
    if not isinstance(said, dict):
        return [f"{where} must be a table"]
    found = [f"{where}.{key}: no such key; known are {', '.join(_KEYS)}" for key in said if key not in _KEYS]
    bounds = {"partitions": _MOST_PARTITIONS, "replication": 32_767, "min_insync_replicas": 32_767}
    for key, most in bounds.items():
        value = said.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            found.append(f"{where}.{key}={value!r} must be a whole number from 1 to {most}")
    days = said.get("retention_days", 1)
    if (
        not isinstance(days, int | float)
        or isinstance(days, bool)
        or not (days == _FOREVER or 0 < days <= 36_500)
    ):
        found.append(f"{where}.retention_days={days!r} must be a number above 0, or -1 for ever")
    if said.get("cleanup", "delete") != "delete":
        found.append(
            f"{where}.cleanup={said['cleanup']!r} must be 'delete': records of one key are not versions of one thing, "
            "so compacting would lose tasks"
        )
    if where in ("defaults", f"topics.{READY}") and "partitions" in said:
        found.append(f"{where}.partitions: each topic, and each task type, has its own number")
    config = said.get("config", {})
    if not isinstance(config, dict) or (where == "defaults" and config):
        found.append(f"{where}.config must be a table, and belongs to a topic")
    else:
        found += [f"{where}.config: {name} is settled elsewhere" for name in config if name in _SPOKEN_FOR]
    return found


def _contradictions(merged: dict[str, Any]) -> list[str]:
    """What of the whole cannot work."""
    topics = {name: {**merged["defaults"], **said} for name, said in merged["topics"].items()}
    found = [
        f"topics.{name}: min_insync_replicas={said['min_insync_replicas']} is above replication={said['replication']}, so "
        "nothing could be written"
        for name, said in topics.items()
        if said.get("min_insync_replicas", 1) > said.get("replication", 32_767)
    ]
    here, there = (topics[topic.name]["partitions"] for topic in (CALLBACKS, CALLBACKS_DIVERTED))
    if here != there:
        found.append(
            f"topics.{CALLBACKS.name} has {here} partitions and topics.{CALLBACKS_DIVERTED.name} {there}: they must have as "
            "many, since a target is on the same partition of both"
        )
    if topics[REVOKED.name]["partitions"] != 1:
        found.append(f"topics.{REVOKED.name}.partitions must be 1: {REVOKED.fixed}")
    return found
