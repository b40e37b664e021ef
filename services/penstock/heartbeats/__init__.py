"""Heartbeats: who holds which attempt, and whose time is up.

Reads claims, beats and releases. A claim released within a moment (`settle_s`) never touches PostgreSQL;
one that lives longer becomes `running` there, with its worker. A lease without a sign of life for its timeout
expires: attempt + 1 after back-off, or failed when the tries are used up.

Guarantees
- A claim is acknowledged only when every attempt in it was released or is written `running`: a crash
  redelivers what was only in memory, and a partition's leases are restored from PostgreSQL when it is assigned.
- A lease expires only while its attempt is still the worker's: the write compares attempt and worker.

In doubt it waits: restored leases get their whole timeout anew, and time in which this process itself stood
still is not counted against anybody. A late expiry delays one task; a false one runs it twice.
"""
