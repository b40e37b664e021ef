"""Heartbeats: the leases that workers hold on attempts, and their expiry.

Reads claims, beats and releases. A claim that is released within `settle_s` never touches
PostgreSQL; one that lives longer becomes `running` there, with its worker. A lease without a
heartbeat for its timeout expires: attempt + 1 after back-off, failed when the attempts are used up,
quarantined when too many workers were lost. A revocation asks its worker to stop.

Guarantees
- A claim is acknowledged only when every attempt in it was released or is written `running`: a
  crash redelivers what was only in memory, and a partition's leases are restored from PostgreSQL
  when it is assigned.
- The last worker to claim an attempt holds it. A beat extends its worker's lease. It starts one on
  an attempt without a lease, but it takes none from another worker.
- A worker that has missed a revocation gets another one: at each recount the leases of ended
  attempts are dropped, and each later heartbeat for one of them is answered with a revocation.
- A lease expires only while its attempt is still the worker's: the write compares attempt and
  worker.
- A lease expires only after this process has read every heartbeat that was written before the
  deadline. So no stall, restart or rebalance of this process expires a lease, and no other
  machine's clock has any influence.
- A lease expires only after the stage processor has committed every result that was written before
  the deadline. So no lag of that service ends an attempt that has finished.

When in doubt, it waits. While the stage processor is away or lags, no lease expires, however long
that takes: `penstock_lease_overdue_seconds` grows, and an alert fires. A restored lease starts its
whole timeout anew. A stall of this process extends all leases. When many leases would expire at
once, it first verifies that all heartbeats are read. A late expiry delays one task; a false one
runs it twice.
"""
