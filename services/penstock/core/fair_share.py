"""How much of a shared pool one tenant may use: a dynamic threshold. Pure.

A tenant may use a multiple of what is free. Alone it uses almost the whole pool; among others it
uses less. Some of the pool is always free for a tenant that comes next, and no tenant has to be
known beforehand.

Source: A. K. Choudhury and E. L. Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches, IEEE/ACM Transactions on Networking 6 (1998).
"""

from __future__ import annotations

# A tenant alone uses seven eighths of a large pool.
_MULTIPLE = 7


def room_left(free: int, used: int) -> int:
    """How many more places a tenant may take, one after the other.

    Args:
        free: places in use by no tenant.
        used: places that the tenant uses.
    """
    return max((_MULTIPLE * free - used) // (_MULTIPLE + 1), int(not used and free > 0))


def most_used(free: int) -> int:
    """How many places a tenant may use, including the one that it asks for; at least one.

    Args:
        free: places in use by no tenant, before it takes one.
    """
    return max(1, _MULTIPLE * (free - 1))
