"""Maps: windows, chunks, tolerated failures, k of n."""

from dataclasses import replace

import pytest
from tests.support.flows import (
    CANCELLED,
    FAILED,
    SUCCEEDED,
    begun,
    fan_out,
    flow,
    task,
)

from penstock.core.flow.fan_out import CHUNK, FIRST_CHUNK
from penstock.core.flow.messages import (
    CancelNode,
    ItemEnded,
    Listed,
    OpenItems,
    Visited,
)
from penstock.core.flow.state import FlowStatus, Items


@pytest.mark.parametrize("total", [0, 1, 199, 200, 201, 2_200, 2_201, 100_000])
def test_a_fan_out_opens_each_item_once_and_ends(total):
    """F6: chunks by a cursor; the map ends with its last item, and at once without any."""
    owner = begun(flow(m=fan_out(parallel=100_000), after=task("m")), totals={"m": total})
    opened = [action.count for action in owner.actions if isinstance(action, OpenItems)]
    while owner.inbox:
        [waiting] = owner.inbox
        assert waiting == Visited("m")
        owner.inbox.clear()
        owner.apply([waiting])
    opened = [action.count for action in owner.actions if isinstance(action, OpenItems)]
    assert (sum(opened), opened[:1]) == (total, [min(total, FIRST_CHUNK)] if total else [])
    assert max(opened, default=0) <= CHUNK
    children = sorted(owner.children - {("after", None, 0)})
    for first in range(0, total, CHUNK):
        assert owner.statuses()["after"] == "pending"
        batch = [owner.ending(child) for child in children[first : first + CHUNK]]
        owner.apply(batch + batch[:10])
    assert owner.nodes["m"].items == Items(total, total, total)
    assert owner.largest_load == 2
    assert owner.end("after").flow.status is FlowStatus.SUCCEEDED


def test_items_that_end_before_the_last_chunk_opens_do_not_end_the_map():
    """F6: the list is known first, so a map never ends early."""
    owner = begun(flow(m=fan_out(parallel=100_000)), totals={"m": FIRST_CHUNK + 1})
    owner.apply([owner.ending(child) for child in sorted(owner.children)])
    assert len(owner.children) == 1
    owner.apply(owner.inbox)
    owner.end("m", FIRST_CHUNK)
    assert owner.flow.status is FlowStatus.SUCCEEDED
    assert max(owner.history.values()) == 1


def test_an_item_that_ends_twice_counts_once():
    """F6: duplicates in one decision."""
    owner = begun(flow(m=fan_out()), totals={"m": 2})
    end = ItemEnded("m", 0, 0, SUCCEEDED)
    owner.apply([end, end, replace(end, outcome=FAILED)])
    assert owner.nodes["m"].items == Items(2, 2, 1)


@pytest.mark.parametrize(("tolerate", "ends"), [(0, "failed"), (1, "failed"), (2, "succeeded")])
def test_a_map_tolerates_failed_items(tolerate, ends):
    """F6: one failure more than tolerated opens no further item, and those that run finish."""
    failing = {("m", 0): FAILED, ("m", 1): CANCELLED}
    owner = begun(flow(m=fan_out(tolerate=tolerate, parallel=2)), totals={"m": 6}, ends=failing)
    owner.end("m", 0).end("m", 1)
    while owner.children:
        owner.end("m", min(child[1] for child in owner.children))
    assert owner.statuses()["m"] == ends
    assert owner.nodes["m"].items.opened == {0: 3, 1: 3, 2: 6}[tolerate] - (tolerate == 0)


def test_k_items_are_enough_and_the_others_are_cancelled():
    """F6: the map ends when the cancelled items have, and is successful whatever they do."""
    owner = begun(flow(m=fan_out(k=2)), totals={"m": 5})
    owner.end("m", 0).end("m", 3)
    assert owner.actions.count(CancelNode("m", 0)) == 1
    assert owner.flow.status is FlowStatus.RUNNING
    owner.end("m", 1, outcome=FAILED).end("m", 2, outcome=CANCELLED).end("m", 4)
    assert owner.flow.status is FlowStatus.SUCCEEDED
    assert owner.actions.count(CancelNode("m", 0)) == 1


@pytest.mark.parametrize("first", [SUCCEEDED, FAILED])
def test_the_kth_success_and_a_failure_together(first):
    """F6: in one decision or in two, in either order, the success decides."""
    second = FAILED if first is SUCCEEDED else SUCCEEDED
    ends = [ItemEnded("m", 0, 0, first), ItemEnded("m", 1, 0, second)]
    for batches in ([ends], [ends[:1], ends[1:]]):
        owner = begun(flow(m=fan_out(k=2)), totals={"m": 3})
        owner.end("m", 2)
        for batch in batches:
            owner.apply(batch)
        assert owner.flow.status is FlowStatus.SUCCEEDED


def test_k_that_cannot_be_reached_fails_the_map():
    """F6: at once for a list that is too short, else when too few items are left."""
    owner = begun(flow(m=fan_out(k=2)), totals={"m": 1})
    assert owner.flow.status is FlowStatus.FAILED
    assert owner.history == {}
    owner = begun(
        flow(m=fan_out(k=2, parallel=1)), totals={"m": 3}, ends={("m", 0): FAILED, ("m", 1): FAILED}
    )
    owner.end("m", 0).end("m", 1)
    assert owner.flow.status is FlowStatus.FAILED
    assert len(owner.history) == 2


def test_a_list_that_arrives_twice_counts_once():
    """F6: the list of a map is fixed."""
    owner = begun(flow(m=fan_out(parallel=1)), totals={"m": 2})
    owner.apply([Listed("m", 0, 7)])
    assert owner.nodes["m"].items.total == 2
