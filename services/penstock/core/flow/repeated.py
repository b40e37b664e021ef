"""Decisions that repeat: flows of one definition pass through the same few states.

A decision follows from the plan, the rows and the messages alone, so the answer for one flow is
that for all others in the same state. It fails open: what it cannot compare is decided anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime

from penstock.core.flow.decide import Decision, decide
from penstock.core.flow.messages import Began, Chosen, Ended, Message
from penstock.core.flow.plan import Plan
from penstock.core.flow.state import FlowState, NodeState

# Decisions that are kept for a definition; beyond, all are forgotten.
_KEPT = 500
# More messages or rows than this rarely repeat, and take longer to compare.
_MOST = 8
# Kinds of messages that occur with few different values.
_KINDS = frozenset({Began, Chosen, Ended})


class RepeatedDecisions:
    """Decides the flows of one definition, each different question once.

    Args:
        plan: of the definition.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[Hashable, Decision] = {}

    def decide(
        self,
        flow: FlowState,
        messages: Sequence[Message],
        now: datetime,
        *,
        nodes: Mapping[str, NodeState],
    ) -> Decision:
        """As `penstock.core.flow.decide`; the answer may be that of an earlier call."""
        question = self._question(flow, messages, nodes)
        if question is None:
            return decide(self._plan, flow, messages, now, nodes=nodes)
        found = self._found.get(question)
        if found is None:
            found = decide(self._plan, flow, messages, now, nodes=nodes)
            if len(self._found) >= _KEPT:
                self._found.clear()
            self._found[question] = found
        return found

    def _question(
        self, flow: FlowState, messages: Sequence[Message], nodes: Mapping[str, NodeState]
    ) -> Hashable | None:
        # The moments of limits follow from the clock.
        if self._plan.has_limits or len(messages) > _MOST or len(nodes) > _MOST:
            return None
        for message in messages:
            # Each failure has a reason of its own.
            if type(message) not in _KINDS or (type(message) is Ended and message.reason):
                return None
        rows: list[Hashable] = []
        for name, node in nodes.items():
            if node.items is not None or node.reason:
                return None
            # The position of the edge states is 2; they are a mapping, which has no hash.
            rows.append((name, *node[:2], *node.edge_states.items(), node[3:]))
        return flow, tuple(messages), tuple(rows)
