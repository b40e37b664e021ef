"""Definitions as the owner of flows reads them; they never change, so each is read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import orjson

from penstock.cel import Path, compile_expression
from penstock.core.flow.plan import NodeKind, Plan
from penstock.core.flow.repeated import RepeatedDecisions
from penstock.errors import InvalidExpression, NotFound
from penstock.flows.expressions import ITEM_VARIABLES, expressions_of
from penstock.postgres.queries import fetch

# Definitions that one process keeps. A thousand nodes take about a megabyte.
_KEPT = 500


class Definition:
    """A definition, with what its expressions read.

    Args:
        document: a valid definition (`schemas/flows/definition.schema.json`).

    Attributes:
        document: the definition.
        plan: what `penstock.core.flow` decides by.
        decisions: decides by the plan.
        nodes: the nodes as written, by name.
        inputs: the declared inputs.
        output: the expression of the flow's output, if it has one.
        listed_maps: the maps whose output, the list of their items' results, is read. That of other
            maps is not collected: it may have 100,000 results.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.plan = Plan.from_wire(document)
        self.decisions = RepeatedDecisions(self.plan)
        self.nodes: Mapping[str, Mapping[str, Any]] = document["nodes"]
        self.inputs: Mapping[str, Mapping[str, Any]] = document.get("inputs", {})
        self.output: str | None = document.get("output")
        self._reads: dict[str | None, set[str]] = {}
        listed: set[str] = set()
        for place in expressions_of(document):
            reads = self._reads.setdefault(place.node, set())
            for path in _paths(place.text):
                if path.names[0] == "nodes" and len(path.names) > 1:
                    reads.add(path.names[1])
                    if path.names[2:3] in ((), ("output",)):
                        listed.add(path.names[1])
        self.listed_maps = frozenset(name for name in listed if self.plan.nodes[name].kind is NodeKind.MAP)

    def reads(self, name: str | None) -> AbstractSet[str]:
        """The nodes that the expressions of a node read; those of the flow's output for None."""
        return self._reads.get(name, frozenset())


def _paths(text: str) -> Sequence[Path]:
    try:
        return compile_expression(text, ITEM_VARIABLES).paths
    except InvalidExpression:
        # Its node fails when it is evaluated. A later release may refuse what this one stored.
        return ()


class Definitions:
    """The definitions that this process has read."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], Definition] = OrderedDict()

    async def load(self, connection: Any, wanted: Iterable[tuple[str, int]]) -> None:
        """Reads those definitions that are not known.

        Args:
            connection: of the caller's transaction, inside `translated`.
            wanted: names and versions.
        """
        missing = {key for key in wanted if key not in self._known}
        if not missing:
            return
        rows = await fetch(
            connection, "flows.definitions", [key[0] for key in missing], [key[1] for key in missing]
        )
        for row in rows:
            self._known[row["name"], row["version"]] = Definition(orjson.loads(row["definition"]))
        while len(self._known) > max(_KEPT, len(missing)):
            self._known.popitem(last=False)

    def get(self, name: str, version: int) -> Definition:
        """A definition that `load` has read.

        Raises:
            NotFound: it does not exist.
        """
        found = self._known.get((name, version))
        if found is None:
            raise NotFound(f"there is no definition {name!r} with version {version}")
        self._known.move_to_end((name, version))
        return found
