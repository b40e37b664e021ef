"""Service `flows`: advances flows.

Guarantees:

- A message and its effect are one transaction, so neither is lost or applied twice. A crash
  at any moment repeats nothing.
- A node that waits is a row. No process, slot or lease waits with it.
- Any number of replicas may run. Each family of flows belongs to the replica that owns its shard;
  a replica that has lost its shard changes nothing wrongly, because it locks what it applies.

In doubt it starts nothing: an expression that fails, fails its node; a flow that cannot be applied
waits, with an error in the log and a metric, and holds up no other flow. While the object store is
away, only flows that need an object wait.
"""
