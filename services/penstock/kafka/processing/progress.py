"""The progress of a processor, for its stall detector.

Faust can hang in a rebalance, stop reading a partition, or lose a record that is in flight. An idle
processor and one without partitions have no values. While the lag is unknown, reading has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from penstock.core.offset_tracker import OffsetTracker, Partition
from penstock.kafka.processing.faust_app import FaustApp


def progress_of(
    app: FaustApp, tracker: OffsetTracker, busy: AbstractSet[str], stalled: Mapping[Partition, int] | None
) -> dict[str, int]:
    """Names what should progress now, each with a value that changes when it does.

    Args:
        app: Faust.
        tracker: of the records in flight.
        busy: topics whose agent has a record now.
        stalled: see `UnreadPartitions`.
    """
    generation = app.generation
    if app.rebalancing or tracker.generation != generation:
        # Each further rebalance changes the value: a group that many members join at once makes
        # progress.
        return {"rebalancing": generation}
    progress = {
        f"settling {topic}/{number} from {offset}": generation
        for (topic, number), offset in tracker.oldest().items()
    }
    expected = tracker.expected()
    for partition, offset in (stalled or {}).items():
        topic, number = partition
        # While an agent has a record, those of other partitions wait for it.
        if expected.get(partition) == offset and topic not in busy:
            progress[f"reading {topic}/{number} from {offset}"] = generation
    return progress
