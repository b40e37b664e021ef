"""The answers to the statements that the owner of flows runs (`flows.sql`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.core.task import FINAL, State
from penstock.testing.database import Row, answers, rows_of
from penstock.testing.flow_tables import RUNNING, Statements
from penstock.testing.task_rows import TaskRow, result_columns

_NUMBERS = ("generation", "opened", "succeeded", "unsuccessful", "retry")
_NOT_STARTED = frozenset({"pending", "ready", "skipped", "blocked"})
_NOT_FINISHED = frozenset({"pending", "ready", "running"})
# States in which no worker has claimed a task.
_UNCLAIMED = frozenset({State.SCHEDULED, State.READY, State.QUEUED, State.PAUSED})


class OwnerStatements(Statements):
    """Answers the owner's statements."""

    @answers("flows.lock")
    def _lock(self, ids: Sequence[int], levels: int) -> Iterator[Row]:
        ends, level = set(ids), set(ids)
        for _ in range(levels):
            flows = [self._rows.flows[one] for one in level if one in self._rows.flows]
            level = {flow["parent_id"] for flow in flows if flow["parent_id"] and flow["unfinished"] <= 1}
            ends |= level
        for flow_id in sorted(ends):
            if (flow := self._rows.flows.get(flow_id)) is not None:
                root = self._rows.flows.get(flow["root_id"], flow)
                inherited = {name: root[name] for name in ("versions", "priority", "schedule", "tick")}
                yield Row(flow | inherited | {"now": self._clock.now})

    @answers("flows.nodes")
    def _read_nodes(self, flow_ids: Sequence[int], names: Sequence[str]) -> Iterator[Row]:
        for key in zip(flow_ids, names, strict=True):
            if key in self._rows.nodes:
                yield self._rows.nodes[key]

    @answers("flows.eligible")
    def _eligible(self, flow_id: int) -> Iterator[Row]:
        for node in self._nodes_of(flow_id):
            if node["status"] == "ready" or (node["status"] == RUNNING and node["total"] is not None):
                yield node

    def _nodes_of(self, flow_id: int) -> Iterator[Row]:
        return (node for (one, _name), node in self._rows.nodes.items() if one == flow_id)

    @answers("flows.item_results")
    def _item_results(self, flow_id: int, node: str, first: int, last: int) -> Iterator[Row]:
        newest: dict[int, TaskRow] = {}
        for row in self._tasks.of_flow(flow_id, node):
            assert row.flow is not None
            if row.flow.item is not None and first <= row.flow.item <= last:
                newest[row.flow.item] = row
        for item, row in sorted(newest.items()):
            yield Row(item=item, state=row.state.value, **result_columns(row.result))

    @answers("flows.item_outputs")
    def _item_outputs(self, flow_id: int, node: str, first: int, last: int) -> Iterator[Row]:
        children = self._rows.children(flow_id, node)
        newest = {flow["parent_item"]: flow for flow in children if first <= flow["parent_item"] <= last}
        for item, flow in sorted(newest.items()):
            has_output = flow["output"] is not None or flow["output_ref"] is not None
            yield Row(
                item=item,
                state=flow["status"],
                result=flow["output"],
                result_ref=flow["output_ref"],
                result_type="json" if has_output else None,
            )

    @answers("flows.claimed")
    def _claimed(
        self, flow_ids: Sequence[int], nodes: Sequence[str], generations: Sequence[int]
    ) -> Iterator[Row]:
        for flow_id, node, generation in zip(flow_ids, nodes, generations, strict=True):
            for row in self._tasks.of_flow(flow_id, node):
                assert row.flow is not None
                was_claimed = row.step > 0 or row.failures + row.losses > 0 or row.state not in _UNCLAIMED
                if row.flow.generation == generation and row.flow.item is None and was_claimed:
                    yield Row(flow_id=flow_id, flow_node=node, flow_generation=generation)

    @answers("flows.live_tasks")
    def _live_tasks(self, flow_id: int, node: str | None, most: int) -> list[Row]:
        live = [Row(id=row.id) for row in self._tasks.of_flow(flow_id, node) if row.state not in FINAL]
        return live[:most]

    @answers("flows.reopen_tasks")
    def _reopen_tasks(self, flow_id: int, node: str, generation: int, below: int, most: int) -> list[Row]:
        over = {
            row.flow.item
            for row in self._tasks.of_flow(flow_id, node)
            if row.flow is not None and (row.state is State.SUCCEEDED or row.flow.generation == generation)
        }
        return [Row(item=item) for item in range(below) if item not in over][:most]

    @answers("flows.reopen_flows")
    def _reopen_flows(self, flow_id: int, node: str, generation: int, below: int, most: int) -> list[Row]:
        last = {flow["parent_item"]: flow for flow in self._rows.children(flow_id, node)}
        found = []
        for item in range(below):
            child = last.get(item)
            if child is None:
                found.append(Row(item=item, id=None))
            elif child["status"] != "succeeded" and child["parent_generation"] != generation:
                found.append(Row(item=item, id=child["id"]))
        return found[:most]

    @answers("flows.child")
    def _child(self, flow_id: int, node: str, item: int | None) -> list[Row]:
        found = [flow for flow in self._rows.children(flow_id, node) if flow["parent_item"] == item]
        return [Row(id=flow["id"]) for flow in found[-1:]]

    @answers("flows.runs")
    def _runs(self, ids: Sequence[int]) -> Iterator[Row]:
        for flow in (self._rows.flows[one] for one in ids if one in self._rows.flows):
            yield Row({name: flow[name] for name in ("id", "name", "output", "output_ref", "error")})

    @answers("flows.first_failed")
    def _first_failed(self, flow_id: int) -> list[Row]:
        failed = [node for node in self._nodes_of(flow_id) if node["status"] in ("failed", "cancelled")]
        failed.sort(key=lambda node: (node["status"] != "failed", node["finished_at"], node["name"]))
        return failed[:1]

    @answers("flows.known_types")
    def _known_types(self, names: Sequence[str]) -> Iterator[Row]:
        return (Row(name=name) for name in names if self._tasks.has_type(name))

    # -- what the owner writes

    @answers("flows.write_flows")
    def _write_flows(self, *, ended: Sequence[int], **columns: Any) -> None:
        now = self._clock.now
        for flow_id in ended:
            self._unwait(flow_id, None, kinds=None)
        for row in rows_of(columns):
            flow = self._rows.flows[row["id"]]
            flow |= row
            flow |= {
                "generation": row["generation"] or 0,
                "paused": bool(row["paused"]),
                "unsuccessful": row["unsuccessful"] or 0,
                "updated_at": now,
                "finished_at": None if row["status"] == RUNNING else flow["finished_at"] or now,
            }

    @answers("flows.write_nodes")
    def _write_nodes(self, **columns: Any) -> None:
        now = self._clock.now
        for row in rows_of(columns):
            key = (row["flow_id"], row["name"])
            row |= {name: row[name] or 0 for name in _NUMBERS}
            row |= {name: bool(row[name]) for name in ("recovers", "enough")}
            before = self._rows.nodes.get(key)
            same = before is not None and before["generation"] == row["generation"]
            for name, none in (("started_at", _NOT_STARTED), ("finished_at", _NOT_FINISHED)):
                kept = before[name] if before is not None and same else None
                row[name] = None if row["status"] in none else kept or now
            self._rows.nodes[key] = row

    @answers("flows.keep_history")
    def _keep_history(self, flow_id: int, names: Sequence[str], generation: int) -> None:
        for name in names:
            node = self._rows.nodes.get((flow_id, name))
            if node is not None and node["status"] not in ("pending", "ready"):
                past = Row(node | {"flow_generation": generation})
                self._rows.past_nodes.setdefault((flow_id, name, generation), past)

    @answers("flows.write_limits")
    def _write_limits(self, **columns: Any) -> None:
        for row in rows_of(columns):
            self._rows.limits.setdefault((row["flow_id"], row["node"], row["generation"], row["kind"]), row)

    @answers("flows.write_waits")
    def _write_waits(self, **columns: Any) -> None:
        for row in rows_of(columns):
            self._rows.waits.setdefault((row["flow_id"], row["node"]), row)

    @answers("flows.unwait")
    def _unwait(self, flow_id: int, node: str | None, kinds: Sequence[str] | None = ("timer",)) -> list[Row]:
        """Deletes waits, and limits of these kinds; None is every kind."""
        waits = [key for key in self._rows.waits if key[0] == flow_id and node in (None, key[1])]
        limits = [
            key
            for key in self._rows.limits
            if key[0] == flow_id and node in (None, key[1]) and (kinds is None or key[3] in kinds)
        ]
        return [self._rows.waits.pop(key) for key in waits] + [self._rows.limits.pop(key) for key in limits]

    @answers("flows.write_inbox")
    def _write_inbox(self, **columns: Any) -> None:
        for row in rows_of(columns):
            self._rows.note(**row)

    @answers("flows.command_children")
    def _command_children(self, *, flow_id: int, node: str | None, kind: str, recovering: list[int]) -> None:
        for flow in self._rows.children(flow_id, node):
            if flow["status"] == RUNNING or flow["id"] in recovering:
                self._rows.note(root_id=flow["root_id"], flow_id=flow["id"], kind=kind)

    @answers("flows.announce_ends")
    def _announce_ends(self, _ids: Sequence[int]) -> None:
        """No request waits in memory."""

    @answers("flows.insert_children")
    def _insert_children(self, **columns: Any) -> list[Row]:
        inserted = []
        for child in rows_of(columns):
            child["generation"] = child["generation"] or 0
            place = {f"parent_{name}": child.pop(name) for name in ("node", "generation", "item")}
            inserted.append(Row(id=self._rows.insert_flow(**place, **child)["id"]))
        return inserted

    @answers("flows.adopt")
    def _adopt(self, ids: Sequence[int], generations: Sequence[int]) -> None:
        for flow_id, generation in zip(ids, generations, strict=True):
            self._rows.flows[flow_id]["parent_generation"] = generation
