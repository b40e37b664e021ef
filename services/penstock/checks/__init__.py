"""`penstock check`: proves on a live system that no task is in limbo (O2b); repairs tasks.

Every unfinished task must have one of these: a lease over a partition that a heartbeat processor
reads, a record on a ready topic, an unread claim or result, a timer, or something it waits for.
Every event must be published, or be due to be published. Every callback must be scheduled,
published, held, delivered or dead.

Leases are in the memory of the heartbeat processors. The check sees them by the heartbeats on Kafka
(`leases`). The processors also search for running attempts without a lease (PENSTOCK_RECOUNT_S).

Guarantees
- Without `repair` it only reads, and joins no consumer group.
- When in doubt, it searches again: a record or row in transit is an offender only if it has not
  moved, in the same attempt, although the system had time to move it.
- It counts offenders up to a bound, keeps the first few and takes bounded memory. No statement
  reads all rows of a large table.
- A repair uses the normal mechanism (`repair`) and compares the attempt with the one that was
  found, so it does not touch a task that has moved meanwhile.
"""
