"""Members of a group of workers describe themselves."""

import pytest
from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from hypothesis import given
from hypothesis import strategies as st

from penstock.kafka.client.member_data import MAX_BYTES, MemberData, assignor

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


@given(st.frozensets(TEXT, max_size=10), st.integers(1, 100_000))
def test_a_worker_is_read_as_it_was_written(stages, slots):
    """W1: any name of a stage is possible."""
    data = MemberData.of_worker(stages, slots)
    assert MemberData.decode(data.encode()) == data
    assert data in (MemberData(stages, slots), MemberData(None, slots))


def test_many_stages_are_left_out():
    """Kafka keeps user data with each generation of a group, so it is bounded."""
    assert MemberData.of_worker({"s" * 200 + str(n) for n in range(100)}, 7) == MemberData(None, 7)
    assert len(MemberData.of_worker({"s" * 200 + str(n) for n in range(15)}, 7).encode()) <= MAX_BYTES


@pytest.mark.parametrize(
    "raw",
    [None, b"", b"\xff\x00", b"[]", b"1", b'{"stages": "s"}', b'{"stages": [1], "slots": "x", "gateway": 2}'],
)
def test_user_data_of_other_clients_is_ignored(raw):
    """O6: members without user data and other clients join the same group."""
    assert MemberData.decode(raw) == MemberData()


def test_members_with_and_without_data_share_a_group():
    """O6: the broker refuses a member whose assignor has another name."""
    made = assignor(MemberData({"s"}, 1), print)
    assert (made.name, made.version) == (
        RoundRobinPartitionAssignor.name,
        RoundRobinPartitionAssignor.version,
    )
    metadata = made.metadata({"topic"})
    assert list(metadata.subscription) == ["topic"]
    assert MemberData.decode(metadata.user_data) == MemberData({"s"}, 1)
    other = assignor(None, print)
    assert (other.name, other.version) == (made.name, made.version)
    assert other.metadata({"topic"}) == RoundRobinPartitionAssignor.metadata({"topic"})


def test_members_are_counted_by_the_one_that_assigns():
    """S6: a member that is alone sends fewer heartbeats; one that does not know whether it is alone
    does not, also when an assignment that it made came to nothing."""
    counts = []
    made = assignor(None, counts.append)
    cluster = ClusterMetadata()
    for members in (1, 2, None):
        metadata = made.metadata(["topic"])
        if members:
            made.assign(cluster, {str(number): metadata for number in range(members)})
        made.on_assignment(None)
    made.assign(cluster, {"only": made.metadata(["topic"])})
    made.metadata(["topic"])
    made.on_assignment(None)
    assert counts == [1, 2, None, None]
