"""The offsets that a worker may commit."""

from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.attempt import AttemptId
from penstock.worker.read_offsets import ReadOffsets

# Partition, gap before the record, and its attempt: an attempt may have several records.
RECORDS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.none() | st.integers(0, 15)), max_size=40
)


@given(RECORDS, st.randoms())
def test_no_offset_is_committed_before_all_records_before_it_are_settled(records, random):
    """W3: an offset is committed only when each record before it has its result or its claim. In
    the end, all offsets are committed."""
    unclaimed = {AttemptId(one, 0, 0) for one in range(16)}
    offsets, end, open_records, committed = ReadOffsets(unclaimed), {}, [], {}

    def commit():
        found = offsets.committable()
        for partition, offset in found.items():
            assert offset > committed.get(partition, 0) or offset == end[partition]
            assert not any(
                tp == partition and at < offset and attempt_id in unclaimed
                for tp, at, attempt_id in open_records
            )
        offsets.committed(found)
        committed.update(found)

    for number, gap, task_id in records:
        partition = TopicPartition("t", number)
        offset = end.get(partition, 0) + gap
        attempt_id = None if task_id is None else AttemptId(task_id, 0, 0)
        offsets.add(partition, offset, attempt_id)
        end[partition] = offset + 1
        open_records.append((partition, offset, attempt_id))
        if random.random() < 0.3:
            unclaimed.discard(AttemptId(random.randrange(16), 0, 0))
            commit()
    unclaimed.clear()
    commit()
    assert committed == end
    assert offsets.unsettled == []
