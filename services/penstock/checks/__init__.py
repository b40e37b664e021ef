"""`penstock check`: proves on a live system that no task is in limbo (O2b), and puts back what is.

Every task that is not final must have a lease over a partition that a heartbeat processor reads, a record on a ready
topic, an unread claim or result, a timer, or something it waits for; every event and callback owed must be published,
scheduled, delivered or dead.

Leases are in the memory of the heartbeat processors. Whether one watches the very attempt that is `running` is theirs to
say, not PostgreSQL's: their recount (PENSTOCK_RECOUNT_S) gives a lease to what runs and is watched by nobody.

Guarantees: without `repair` it only reads, and joins no consumer group. In doubt it looks again: what is between two
places while it looks is an offender only if it is still there, in the same attempt, when the system had time to move
it. Whatever the number of offenders, it counts them all, keeps the first few and takes bounded memory. With `repair`
offenders go back by the normal way (`repair`), each by a comparison with the very attempt that was found, so that
what moves meanwhile is left alone.
"""
