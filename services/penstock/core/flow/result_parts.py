"""The parts in which the results of a map are read, so that memory does not grow with the list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Items of a part. A transaction reads no longer list: 2,000 inline results have at most 8 MiB.
PART_ITEMS = 2_000
# Objects, and their bytes, that are fetched at once. A larger object is fetched alone.
GROUP_OBJECTS = 16
GROUP_BYTES = 16 * 1024 * 1024


def parts(total: int) -> Iterator[range]:
    """The items of each part of a list, in their order."""
    for first in range(0, total, PART_ITEMS):
        yield range(first, min(first + PART_ITEMS, total))


def groups(sizes: Sequence[int]) -> Iterator[range]:
    """Consecutive results that are in memory at the same time.

    Args:
        sizes: bytes to fetch of each result; 0 for one that is here.
    """
    first = objects = held = 0
    for index, size in enumerate(sizes):
        if size and objects and (objects == GROUP_OBJECTS or held + size > GROUP_BYTES):
            yield range(first, index)
            first, objects, held = index, 0, 0
        if size:
            objects, held = objects + 1, held + size
    if first < len(sizes):
        yield range(first, len(sizes))
