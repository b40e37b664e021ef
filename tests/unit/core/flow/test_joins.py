"""Joins: each combination of ends, dead branches, cascades."""

from itertools import permutations

import pytest
from tests.support.flows import (
    ALL,
    ALL_DONE,
    ANY,
    NOW,
    TWO,
    begun,
    flow,
    switch,
    task,
)

from penstock.core.flow.decide import decide, initial
from penstock.core.flow.messages import (
    Visited,
)
from penstock.core.flow.state import FlowStatus, NodeState, NodeStatus

JOINS = {
    # ends of three sources: succeeded, failed, dead
    "sss": {"all": "running", "all_done": "running", "any": "running", "two": "running"},
    "ssd": {"all": "running", "all_done": "running", "any": "running", "two": "running"},
    "sdd": {"all": "running", "all_done": "running", "any": "running", "two": "skipped"},
    "ddd": {"all": "skipped", "all_done": "skipped", "any": "skipped", "two": "skipped"},
    "ssf": {"all": "blocked", "all_done": "running", "any": "running", "two": "running"},
    "sff": {"all": "blocked", "all_done": "running", "any": "running", "two": "blocked"},
    "fff": {"all": "blocked", "all_done": "running", "any": "blocked", "two": "blocked"},
    "sdf": {"all": "blocked", "all_done": "running", "any": "running", "two": "blocked"},
    "ddf": {"all": "blocked", "all_done": "running", "any": "blocked", "two": "blocked"},
}


@pytest.mark.parametrize("ends", JOINS)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_each_join_for_each_combination_of_ends(ends, order):
    """F1: dead branches keep no join waiting, and the order of the ends does not matter."""
    joins = {"all": ALL, "all_done": ALL_DONE, "any": ANY, "two": TWO}
    sources = {f"s{n}": switch() for n in range(3)}
    after = [f"s{n}.taken" for n in range(3)]
    plan = flow(**sources, **{name: task(*after, join=join) for name, join in joins.items()})
    state, nodes = initial(plan)
    nodes = dict(nodes)
    for name in sources:
        nodes[name] = NodeState(NodeStatus.RUNNING)
    state = state._replace(live=3)
    for position in order:
        name, end = f"s{position}", ends[position]
        status = NodeStatus.FAILED if end == "f" else NodeStatus.SUCCEEDED
        nodes[name] = NodeState(status, case="taken" if end == "s" else "other")
        state = state._replace(live=state.live - 1, unfinished=state.unfinished - 1)
        decision = decide(plan, state, [Visited(name)], NOW, nodes=nodes)
        state = decision.flow
        nodes |= decision.nodes
    assert {name: nodes[name].status.value for name in joins} == JOINS[ends]


def test_a_chain_of_a_thousand_skipped_nodes_loads_two_at_a_time():
    """A cascade asks for the rows that it needs, step by step, and does not recurse."""
    chain = {f"n{i}": task(f"n{i - 1}" if i else "route.no") for i in range(1000)}
    owner = begun(flow(route=switch(), **chain), cases={"route": "yes"})
    assert owner.flow.status is FlowStatus.SUCCEEDED
    assert owner.largest_load == 2
