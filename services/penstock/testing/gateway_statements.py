"""The answers to the statements that start flows, bring events to them, and show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from penstock.core.flow import tick_wait
from penstock.testing.database import Row, answers, rows_of_list
from penstock.testing.flow_tables import RUNNING, Statements

# Hours that an event waits for a flow that waits for it.
_EVENT_HOURS = 24


class GatewayStatements(Statements):
    """Answers statements of the gateway."""

    # -- definitions

    @answers("flow_definitions.insert")
    def _insert_definition(
        self, name: str, version: int, definition: str, created_by: str | None
    ) -> list[Row]:
        if (name, version) in self._rows.definitions:
            return []
        row = Row(
            name=name,
            version=version,
            definition=definition,
            created_at=self._clock.now,
            created_by=created_by,
        )
        self._rows.definitions[name, version] = row
        return [row]

    @answers("flow_definitions.get")
    def _definition(self, name: str, version: int) -> list[Row]:
        return [row for key, row in self._rows.definitions.items() if key == (name, version)]

    @answers("flow_definitions.get_newest")
    def _newest_definition(self, name: str) -> list[Row]:
        return [row for key, row in sorted(self._rows.definitions.items()) if key[0] == name][-1:]

    @answers("flow_definitions.newest")
    def _newest(self, names: Sequence[str]) -> list[Row]:
        return [row for name in names for row in self._newest_definition(name)]

    @answers("flow_definitions.many", "flows.definitions")
    def _many_definitions(self, names: Sequence[str], versions: Sequence[int]) -> Iterator[Row]:
        for key in zip(names, versions, strict=True):
            if key in self._rows.definitions:
                yield self._rows.definitions[key]

    # -- starts and commands

    @answers("flows.start")
    def _start(self, **arguments: Any) -> list[Row]:
        answer = [Row(id=None, name=None, idempotency_key=None, schedule=None, tick=None)]
        for start in rows_of_list("given_flow_start", arguments):
            key = start["idempotency_key"]
            if key is not None and self._by_key(start["name"], key):
                continue
            if start["callbacks"] is not None:
                start["callbacks"] = [_text(entry) for entry in orjson.loads(start["callbacks"])]
            flow = self._rows.insert_flow(**start)
            self._rows.note(root_id=flow["id"], flow_id=flow["id"], kind="began")
            answer.append(Row({name: flow[name] for name in answer[0]}))
        return answer

    def _by_key(self, name: str, key: str) -> list[Row]:
        return [
            flow
            for flow in self._rows.flows.values()
            if (flow["name"], flow["idempotency_key"]) == (name, key)
        ]

    @answers("flows.by_idempotency_keys")
    def _by_keys(self, names: Sequence[str], keys: Sequence[str]) -> Iterator[Row]:
        for name, key in zip(names, keys, strict=True):
            for flow in self._by_key(name, key):
                yield Row(id=flow["id"], name=name, idempotency_key=key)

    @answers("flow_commands.command")
    def _command(self, ids: Sequence[int], kind: str, recovery: str) -> Iterator[Row]:
        for flow in (self._rows.flows[one] for one in sorted(ids) if one in self._rows.flows):
            detail = None
            if kind == "recover":
                detail = orjson.dumps(
                    {"generation": flow["generation"] + 1, **orjson.loads(recovery)}
                ).decode()
            self._rows.note(root_id=flow["root_id"], flow_id=flow["id"], kind=kind, detail=detail)
            yield Row(id=flow["id"])

    # -- events

    @answers("flow_events.insert")
    def _insert_events(self, **arguments: Any) -> list[Row]:
        answer = [Row(namespace=None, id=None)]
        for event in rows_of_list("flow_event", arguments):
            key = (event["namespace"], event["id"])
            if key not in self._rows.events:
                self._rows.events[key] = Row(event | {"created_at": self._clock.now})
                answer.append(Row(namespace=key[0], id=key[1]))
        return answer

    @answers("flows.match_events")
    def _match_events(self, _event_ids: Any, _flow_ids: Any) -> list[Row]:
        now = self._clock.now
        matched = 0
        for wait in sorted(self._rows.waits.values(), key=lambda wait: (wait["flow_id"], wait["node"])):
            for event in self._rows.events.values():
                is_old = (now - event["created_at"]).total_seconds() > _EVENT_HOURS * 3600
                if not is_old and all(wait[name] == event[name] for name in ("namespace", "event", "key")):
                    self._end_wait(wait, namespace=event["namespace"], id=event["id"])
                    matched += 1
                    break
        return [Row(matched=matched)]

    @answers("flows.match_runs")
    def _match_runs(self, _flow_ids: Any) -> list[Row]:
        matched = 0
        for wait in sorted(self._rows.waits.values(), key=lambda wait: (wait["flow_id"], wait["node"])):
            runs = [
                flow
                for flow in self._rows.flows.values()
                if wait["namespace"] == tick_wait.NAMESPACE
                and flow["tick"] is not None
                and flow["parent_id"] is None
                and tick_wait.awaited_run(flow["name"], flow["tick"]) == (wait["event"], wait["key"])
            ]
            if runs and runs[-1]["status"] != RUNNING:
                self._end_wait(wait, flow=runs[-1]["id"], status=runs[-1]["status"])
                matched += 1
        return [Row(matched=matched)]

    def _end_wait(self, wait: Row, **detail: Any) -> None:
        del self._rows.waits[wait["flow_id"], wait["node"]]
        columns = {name: wait[name] for name in ("root_id", "flow_id", "node", "generation")}
        self._rows.note(kind="event", detail=orjson.dumps(detail).decode(), **columns)

    @answers("flows.events")
    def _events(self, namespaces: Sequence[str], ids: Sequence[str]) -> Iterator[Row]:
        for key in zip(namespaces, ids, strict=True):
            if key in self._rows.events:
                yield self._rows.events[key]

    # -- views

    @answers("flow_views.get")
    def _view(self, flow_id: int) -> Iterator[Row]:
        if (flow := self._rows.flows.get(flow_id)) is None:
            return
        root = self._rows.flows.get(flow["root_id"])
        own = flow["definition"] or self._rows.definitions[flow["name"], flow["version"]]["definition"]
        yield Row(
            flow
            | {
                "root_versions": root["versions"] if root is not None else None,
                "definition_json": own,
                "recovering": flow["status"] != RUNNING and self._is_to_recover(flow),
                "now": self._clock.now,
            }
        )

    def _is_to_recover(self, flow: Row) -> bool:
        """Whether the inbox has the next recovery of a flow."""
        return any(
            row["flow_id"] == flow["id"]
            and row["kind"] == "recover"
            and orjson.loads(row["detail"])["generation"] == flow["generation"] + 1
            for row in self._rows.inbox
        )

    @answers("flow_views.nodes")
    def _view_nodes(self, flow_id: int) -> Iterator[Row]:
        for (one, name), node in self._rows.nodes.items():
            if one != flow_id:
                continue
            tasks = [
                row
                for row in self._tasks.of_flow(flow_id, name)
                if row.flow is not None
                and row.flow.item is None
                and row.flow.generation == node["generation"]
            ]
            children = [flow for flow in self._rows.children(flow_id, name) if flow["parent_item"] is None]
            task, child = tasks[-1:], children[-1:]
            yield Row(
                node
                | {
                    "task_id": task[0].id if task else None,
                    "task_type": task[0].type if task else None,
                    "task_state": task[0].state.value if task else None,
                    "child_id": child[0]["id"] if child else None,
                    "child_status": child[0]["status"] if child else None,
                }
            )

    @answers("flow_views.history")
    def _view_history(self, flow_id: int, most: int) -> list[Row]:
        past = [node for key, node in self._rows.past_nodes.items() if key[0] == flow_id]
        return sorted(past, key=lambda node: (-node["flow_generation"], node["name"]))[:most]


def _text(entry: Any) -> str:
    """An element of a JSON array as `jsonb_array_elements_text` returns it."""
    return entry if isinstance(entry, str) else orjson.dumps(entry).decode()
