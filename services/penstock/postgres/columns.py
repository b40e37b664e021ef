"""The lists of columns that statements fill: a new column is one line.

A statement names a list in double braces, and `penstock.postgres.queries` puts the list there. The
columns of a task are one list for the statements and for the documents of the API: `COLUMNS` has
one line for each column of `penstock.task` that a submission fills, that history keeps or that
answers show. `RELEASE_LISTS` are made of the order of release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.core.attempt import CHOSEN
from penstock.core.release_order import KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of `penstock.task`.

    Attributes:
        name: its name in the table.
        parameter: its SQL type, when a submission fills it; None for the others.
        computed: the statement `tasks.submit` computes the value, from the submission and its type.
        in_history: `penstock.history` has the column too.
        shown: the API's documents show the value as it is.
    """

    name: str
    parameter: str | None = None
    computed: bool = False
    in_history: bool = True
    shown: bool = True


COLUMNS = (
    Column(name="id"),
    Column(name="type", parameter="text"),
    Column(name="state"),
    Column(name="stage", parameter="text", computed=True),
    Column(name="step"),
    Column(name="attempt"),
    Column(name="failures", shown=False),
    Column(name="losses", shown=False),
    Column(name="priority", parameter="smallint", shown=False),
    Column(name="content_type", parameter="text", shown=False),
    Column(name="context", parameter="bytea", shown=False),
    Column(name="context_ref", parameter="text", shown=False),
    Column(name="context_digest", parameter="bytea", shown=False),
    Column(name="result_type", shown=False),
    Column(name="result", shown=False),
    Column(name="result_ref", shown=False),
    Column(name="error", shown=False),
    Column(name="idempotency_key", parameter="text"),
    Column(name="events", parameter="text", computed=True),
    Column(name="callbacks", parameter="text", computed=True, shown=False),
    Column(name="labels", parameter="text", computed=True, shown=False),
    Column(name="key", parameter="text", computed=True, shown=False),
    Column(name="traceparent", parameter="text", in_history=False, shown=False),
    Column(name="flow_id", shown=False),
    Column(name="flow_node", shown=False),
    Column(name="flow_generation", shown=False),
    Column(name="flow_item", shown=False),
    Column(name="rerun_of", parameter="bigint"),
    Column(name="worker"),
    Column(name="pausing", in_history=False),
    Column(name="due_at", parameter="timestamptz", in_history=False),
    Column(name="created_at"),
    Column(name="updated_at"),
    Column(name="finished_at"),
)

SUBMITTED = tuple(column for column in COLUMNS if column.parameter is not None)
SHOWN = tuple(column.name for column in COLUMNS if column.shown)

# Lists of the keys by which ready tasks are released: the whole order, its level, and the place
# within a level. `_keys` are expressions with their names, `_names` the names, `_position` the
# elements of an array of values to compare with. `release_waited_s` is how long a row with the
# names has waited. Its lookups are not joins, which would read whole tables: our sessions have no
# nested loops.
_NAMED = tuple(f"{key.sql} AS {key.name}" for key in KEYS)
_NAMES = tuple(f"{{t}}{key.name}" for key in KEYS)
_POSITION = tuple(f"({{array}}::bigint[])[{n}]::{key.sql_type}" for n, key in enumerate(KEYS, 1))
_WAITED_S = (
    "extract(epoch FROM now() - coalesce((SELECT f.created_at FROM flow f WHERE f.id = {t}root_id), "
    "(SELECT w.created_at FROM task w WHERE w.id = {t}root_id)))::double precision"
)
RELEASE_LISTS = {
    "release_order": tuple(key.sql for key in KEYS),
    "release_level": (KEYS[0].sql,),
    "release_place": tuple(key.sql for key in KEYS[1:]),
    "release_keys": _NAMED,
    "release_place_keys": _NAMED[1:],
    "release_names": _NAMES,
    "release_place_names": _NAMES[1:],
    "release_position": _POSITION,
    "release_place_position": _POSITION[1:],
    "release_waited_s": (_WAITED_S,),
    "release_nulls": ("NULL",) * len(KEYS),
}

# The columns of a new root flow that are written as they are given, and those that
# `flows.start` computes.
_FLOW_START = {
    "name": "text[]",
    "version": "integer[]",
    "unfinished": "integer[]",
    "inputs": "bytea[]",
    "inputs_ref": "text[]",
    "idempotency_key": "text[]",
    "traceparent": "text[]",
    "rerun_of": "bigint[]",
    "schedule": "text[]",
    "tick": "timestamptz[]",
    "backfill": "bigint[]",
}
_COMPUTED_FLOW_START = {
    "versions": "text[]",
    "priority": "smallint[]",
    "events": "text[]",
    "callbacks": "text[]",
    "labels": "text[]",
}

# The columns of a node that are written as they are given, and those that `flows.write_nodes`
# computes: a column of defaults is given as NULL.
_FLOW_NODE = {
    "status": "text[]",
    "chosen_case": "text[]",
    "timed_out": "text[]",
    "total": "integer[]",
    "reason": "text[]",
    "list": "bytea[]",
    "list_ref": "text[]",
    "output_type": "text[]",
    "output": "bytea[]",
    "output_ref": "text[]",
}
_COMPUTED_FLOW_NODE = {
    "generation": "integer[]",
    "arrivals": "text[]",
    "recovers": "boolean[]",
    "opened": "integer[]",
    "succeeded": "integer[]",
    "unsuccessful": "integer[]",
    "retry": "integer[]",
    "enough": "boolean[]",
}

# The lists whose columns are parameters, too: each column with the SQL type of its parameter.
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "submitted": {column.name: f"{column.parameter}[]" for column in SUBMITTED},
    "flow_start": _FLOW_START,
    "given_flow_start": _FLOW_START | _COMPUTED_FLOW_START,
    "flow_node": _FLOW_NODE,
    "written_flow_node": _FLOW_NODE | _COMPUTED_FLOW_NODE,
    "given_flow_node": {"flow_id": "bigint[]", "name": "text[]"} | _FLOW_NODE | _COMPUTED_FLOW_NODE,
    "flow_event": {
        "namespace": "text[]",
        "id": "text[]",
        "event": "text[]",
        "key": "text[]",
        "data": "bytea[]",
        "data_ref": "text[]",
    },
    "flow_limit": {
        "root_id": "bigint[]",
        "flow_id": "bigint[]",
        "node": "text[]",
        "generation": "integer[]",
        "kind": "text[]",
        "at": "timestamptz[]",
    },
    "flow_wait": {
        "root_id": "bigint[]",
        "flow_id": "bigint[]",
        "node": "text[]",
        "generation": "integer[]",
        "namespace": "text[]",
        "event": "text[]",
        "key": "text[]",
    },
    "audit_entry": {
        "at": "timestamptz[]",
        "actor": "text[]",
        "route": "text[]",
        "path": "text[]",
        "status": "smallint[]",
        "remote": "text[]",
        "change": "text[]",
    },
    "schedule_skip": {
        "schedule": "text[]",
        "first_tick": "timestamptz[]",
        "last_tick": "timestamptz[]",
        "ticks": "integer[]",
        "reason": "text[]",
        "detail": "text[]",
    },
    "new_flow_task": {
        "type": "text[]",
        "stage": "text[]",
        "priority": "smallint[]",
        "content_type": "text[]",
        "context": "bytea[]",
        "context_ref": "text[]",
        "key": "text[]",
        "traceparent": "text[]",
        "flow_id": "bigint[]",
        "root_id": "bigint[]",
        "flow_priority": "smallint[]",
        "node": "text[]",
        "generation": "integer[]",
        "item": "integer[]",
    },
    "child_flow": {
        "root_id": "bigint[]",
        "parent_id": "bigint[]",
        "node": "text[]",
        "generation": "integer[]",
        "item": "integer[]",
        "name": "text[]",
        "version": "integer[]",
        "unfinished": "integer[]",
        "priority": "smallint[]",
        "inputs": "bytea[]",
        "inputs_ref": "text[]",
    },
    "written_flow": {
        "id": "bigint[]",
        "status": "text[]",
        "generation": "integer[]",
        "paused": "boolean[]",
        "stop": "text[]",
        "unfinished": "integer[]",
        "live": "integer[]",
        "unsuccessful": "integer[]",
        "output": "bytea[]",
        "output_ref": "text[]",
        "error": "text[]",
    },
    "flow_inbox": {
        "root_id": "bigint[]",
        "flow_id": "bigint[]",
        "kind": "text[]",
        "node": "text[]",
        "generation": "integer[]",
        "item": "integer[]",
        "state": "text[]",
    },
    "schedule_advance": {
        "name": "text[]",
        "position": "timestamptz[]",
        "next_tick": "timestamptz[]",
        "next_at": "timestamptz[]",
        "queued": "text[]",
        "queue_at": "timestamptz[]",
        "last_tick": "timestamptz[]",
        "started": "integer[]",
        "error": "text[]",
        "decided": "boolean[]",
    },
    "saved_target": {
        "namespace": "text[]",
        "url": "text[]",
        "abnormal": "boolean[]",
        "count": "integer[]",
        "slow_at_s": "double precision[]",
        "called_at_s": "double precision[]",
        "failures": "integer[]",
        "attempts": "text[]",
    },
    "progress": {
        "id": "bigint[]",
        "step": "integer[]",
        "attempt": "integer[]",
        "worker": "text[]",
        "fraction": "double precision[]",
        "message": "text[]",
        "reported_at": "timestamptz[]",
    },
    "ended_attempt": {
        "id": "bigint[]",
        "step": "integer[]",
        "stage": "text[]",
        "attempt": "integer[]",
        "to_state": "text[]",
        "to_stage": "text[]",
        "to_step": "integer[]",
        "to_attempt": "integer[]",
        "failures": "integer[]",
        "losses": "integer[]",
        "delay_s": "double precision[]",
        "content_type": "text[]",
        "context": "bytea[]",
        "context_ref": "text[]",
        "error": "text[]",
        "outcome": "text[]",
        "worker": "text[]",
        "started_ms": "bigint[]",
        "finished_ms": "bigint[]",
        "goes_on": "integer[]",
        "partition": "integer[]",
        # These are of the last attempt of a chain: its own fence, and the context it began with.
        "last_step": "integer[]",
        "last_stage": "text[]",
        "last_attempt": "integer[]",
        "input_type": "text[]",
        "input": "bytea[]",
        "input_ref": "text[]",
    },
    "chained_attempt": {
        "chained_id": "bigint[]",
        "chained_step": "integer[]",
        "chained_stage": "text[]",
        "chained_attempt": "integer[]",
        "chained_started_ms": "bigint[]",
        "chained_finished_ms": "bigint[]",
        "chained_is_first": "boolean[]",
        "chained_replaces": "boolean[]",
        "chained_input_type": "text[]",
        "chained_input": "bytea[]",
        "chained_input_ref": "text[]",
    },
    "claim": {
        "id": "bigint[]",
        "step": "integer[]",
        "attempt": "integer[]",
        "worker": "text[]",
        "partition": "integer[]",
        "lease_ms": "integer[]",
        "max_attempts": "integer[]",
        "by_heartbeat": "boolean[]",
    },
}

# All lists that a statement may name.
LISTS: Mapping[str, Iterable[str]] = {
    **PARAMETERS,
    "verbatim_columns": tuple(column.name for column in SUBMITTED if not column.computed),
    "history_columns": tuple(column.name for column in COLUMNS if column.in_history),
    **RELEASE_LISTS,
    # Attempts from this number on have a number that a worker chose.
    "first_chosen": (str(CHOSEN),),
    # Whether a worker may go on with the task of a row `t` by the result `i`.
    "goes_on": (
        "(i.goes_on IS NOT NULL AND i.to_state = 'ready' AND NOT (t.pausing OR t.tracked OR t.state = 'paused'))",
    ),
}


def expanded(name: str, prefix: str = "") -> str:
    """A list as SQL.

    Args:
        name: of the list.
        prefix: the alias of the table, or the array of `release_position`; "" is none. `$` alone
            makes the parameters of the columns.
    """
    if prefix == "$":
        return ", ".join(f"${column}::{kind}" for column, kind in PARAMETERS[name].items())
    alias = f"{prefix}." if prefix else ""
    return ", ".join(
        each.replace("{t}", alias).replace("{array}", prefix) if "{" in each else alias + each
        for each in LISTS[name]
    )
