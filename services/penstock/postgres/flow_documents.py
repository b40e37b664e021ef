"""Turns rows of flows into the documents of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.contracts.context import ContentType, Context
from penstock.core.flow.state import NodeStatus
from penstock.core.task import Priority
from penstock.postgres import tasks
from penstock.postgres.flow_views import is_archived
from penstock.postgres.flows import items_of

Row: TypeAlias = Mapping[str, Any] | asyncpg.Record

_FLOW_COLUMNS = (
    "id",
    "root_id",
    "name",
    "version",
    "status",
    "paused",
    "stop",
    "generation",
    "unfinished",
    "live",
    "unsuccessful",
    "idempotency_key",
    "events",
    "error",
    "rerun_of",
    "schedule",
    "tick",
    "created_at",
    "updated_at",
    "finished_at",
)
_NODE_COLUMNS = ("status", "generation", "timed_out", "started_at", "finished_at")


def summary(row: Row) -> dict[str, Any]:
    """The document of a flow in lists, without its nodes, inputs and output."""
    document = {name: row[name] for name in _FLOW_COLUMNS}
    document["priority"] = Priority(row["priority"]).name
    document["labels"] = orjson.loads(row["labels"]) if row["labels"] else {}
    document["callbacks"] = subscription.masked(subscription.from_columns(row["callbacks"]))
    document["task"] = row["task_id"]
    document["parent"] = None
    if row["parent_id"] is not None:
        document["parent"] = {
            "flow": row["parent_id"],
            "node": row["parent_node"],
            "item": row["parent_item"],
            "generation": row["parent_generation"],
        }
    return document


def detail(row: Mapping[str, Any], nodes: Mapping[str, Row], history: Sequence[Row]) -> dict[str, Any]:
    """The document of a flow with all nodes of its definition, and those of earlier generations.

    Args:
        row: of `flow_views.get`, or of `flow_views.as_recovered`.
        nodes: rows of `flow_views.nodes`.
        history: rows of `flow_views.history`.
    """
    definition = orjson.loads(row["definition_json"]) if row["definition_json"] else {"nodes": {}}
    return {
        **summary(row),
        "in_history": is_archived(row),
        "versions": orjson.loads(row["versions"]) if row["versions"] else None,
        "nodes": [node_document(name, node, nodes.get(name)) for name, node in definition["nodes"].items()],
        "history": [past(node) for node in history],
    }


def node_document(name: str, node: Mapping[str, Any], row: Row | None) -> dict[str, Any]:
    """The document of one node.

    Args:
        name: its name.
        node: the node of the definition.
        row: a row of `flow_views.nodes`; None for a node that is pending.
    """
    document: dict[str, Any] = {
        "name": name,
        "kind": node["kind"],
        "after": node.get("after", []),
        "status": NodeStatus.PENDING,
        "generation": 0,
        "case": None,
        "timed_out": None,
        "reason": None,
        "items": None,
        "task": None,
        "flow": None,
        "started_at": None,
        "finished_at": None,
    }
    if row is None:
        return document
    document |= {column: row[column] for column in _NODE_COLUMNS}
    document["case"] = row["chosen_case"]
    document["reason"] = row["reason"] or None
    items = items_of(row)
    if items is not None:
        document["items"] = {
            "total": items.total,
            "opened": items.opened,
            "live": items.live,
            "succeeded": items.succeeded,
            "unsuccessful": items.unsuccessful,
            "retry": items.retry,
        }
    if row["task_id"] is not None:
        document["task"] = {
            "id": row["task_id"],
            "type": row["task_type"],
            "state": row["task_state"],
            "logs": logs_path(row["task_id"]),
        }
    if row["child_id"] is not None:
        document["flow"] = {"id": row["child_id"], "status": row["child_status"]}
    return document


def logs_path(task_id: int) -> str:
    """The path of a task's logs in the API."""
    return f"/tasks/{task_id}/logs"


def past(row: Row) -> dict[str, Any]:
    """The document of a node as it was before a recovery."""
    return {
        "flow_generation": row["flow_generation"],
        "name": row["name"],
        **{column: row[column] for column in _NODE_COLUMNS},
        "case": row["chosen_case"],
        "reason": row["reason"] or None,
        "total": row["total"],
        "succeeded": row["succeeded"],
        "unsuccessful": row["unsuccessful"],
    }


def context_of(row: Row, name: str) -> Context | None:
    """The inputs or the output of a flow, or the output of a node; None when there is none.

    Args:
        row: of the flow or node; a node's has the content type.
        name: `inputs` or `output`.
    """
    if row[name] is None and row[f"{name}_ref"] is None:
        return None
    # The inputs and outputs of flows are JSON.
    return tasks.context_of({f"{name}_type": ContentType.JSON, **row}, name)
