"""`penstock check`: proves on a live system that no task is in limbo (O2b).

Every task that is not final must have a live lease, a record on a ready topic, a timer, or something it waits
for; every event and callback owed must be published, scheduled, delivered or dead.

Guarantees: it only reads, and joins no consumer group. In doubt it looks again: what is between two places while
it looks is an offender only if it is still there, in the same attempt, when the system had time to move it.
"""
