"""The columns of a task: one list for the statements and for the documents of the API.

`COLUMNS` has one line for each column of `penstock.task` that a submission fills, that history
keeps or that answers show. A statement names a list in double braces, and
`penstock.postgres.queries` puts the list there. `RELEASE_LISTS` are made of the order of release.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    Column(name="worker"),
    Column(name="pausing", in_history=False),
    Column(name="due_at", parameter="timestamptz", in_history=False),
    Column(name="created_at"),
    Column(name="updated_at"),
    Column(name="finished_at"),
)

SUBMITTED = tuple(column for column in COLUMNS if column.parameter is not None)
SHOWN = tuple(column.name for column in COLUMNS if column.shown)

# The parameters of `tasks.submit` before the columns: where a batch was read.
_POSITION_PARAMETERS = 6

# Lists of the keys by which ready tasks are released: the whole order, its level, and the place
# within a level. `_keys` are expressions with their names, `_names` the names, `_position` the
# elements of an array of values to compare with.
_NAMED = tuple(f"{key.sql} AS {key.name}" for key in KEYS)
_NAMES = tuple(f"{{t}}{key.name}" for key in KEYS)
_POSITION = tuple(f"({{array}}::bigint[])[{n}]::{key.sql_type}" for n, key in enumerate(KEYS, 1))
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
    "release_nulls": ("NULL",) * len(KEYS),
}

# The lists that a statement may name.
LISTS = {
    "submitted_parameters": tuple(
        f"${number}::{column.parameter}[]"
        for number, column in enumerate(SUBMITTED, _POSITION_PARAMETERS + 1)
    ),
    "submitted_columns": tuple(column.name for column in SUBMITTED),
    "verbatim_columns": tuple(column.name for column in SUBMITTED if not column.computed),
    "history_columns": tuple(column.name for column in COLUMNS if column.in_history),
    **RELEASE_LISTS,
}


def expanded(name: str, prefix: str = "") -> str:
    """A list as SQL.

    Args:
        name: of the list.
        prefix: the alias of the table, or the array of `release_position`; "" is none.
    """
    alias = f"{prefix}." if prefix else ""
    return ", ".join(
        each.replace("{t}", alias).replace("{array}", prefix) if "{" in each else alias + each
        for each in LISTS[name]
    )
