"""Heartbeats: who holds which attempt, and whose time is up.

Reads claims, beats and releases. A claim released within a moment (`settle_s`) never touches PostgreSQL;
one that lives longer becomes `running` there, with its worker. A lease without a sign of life for its timeout
expires: attempt + 1 after back-off, failed when the tries are used up, quarantined when too many workers were lost;
and whoever may still run the attempt is told to stop.

Guarantees
- A claim is acknowledged only when every attempt in it was released or is written `running`: a crash
  redelivers what was only in memory, and a partition's leases are restored from PostgreSQL when it is assigned.
- The last worker to claim an attempt holds it. A beat keeps what is held, and takes what nobody is known to hold, but
  nothing that another worker holds.
- A lease expires only while its attempt is still the worker's: the write compares attempt and worker.
- Silence counts only as far as the topic is known to have been read: neither a stall nor a restart nor a rebalance of
  this process expires anybody, and no clock but its own plays a part.

In doubt it waits: restored leases get the whole timeout they were claimed with anew, time in which this process itself
stood still is not counted against anybody, and when many leases would expire at once it makes sure first that it is not
itself that does not hear. A late expiry delays one task; a false one runs it twice.
"""
