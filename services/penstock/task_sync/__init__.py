"""Task-sync: moves tasks from the reservoir (PostgreSQL) to the workers (Kafka).

Ingest inserts submissions from the topic `submitted` into PostgreSQL. Release moves ready tasks of
each type to its topic `ready.<type>`, in order and as far as its window allows.

Guarantees
- A submitted record becomes a task exactly once: the transaction that inserts it also writes its
  offset.
- A record that breaks its contract goes to `submitted.rejected` with reason, position and original
  bytes. The records behind it are not delayed.
- While PostgreSQL is behind, the records in flight of each partition of `submitted` are bounded.
  Beyond the bound the partition is paused, until half of them are inserted (`core.admission`).
- The records on a ready topic that no worker has taken are bounded by its window: about one second
  of the workers' work, measured from a sample of attempts; more for starved workers; always between
  a floor and a ceiling (`core.window`). A more urgent task that comes later waits behind these
  records only.
- No worker is idle while tasks of its type wait behind a busy one: their records are withdrawn, and
  each task is released again as a new attempt. Without permission to delete records of ready topics
  they stay, with a warning (`withdrawal`, `core.ready_partitions`).
- A ready task gets a record on its ready topic at least once. The statement that releases a batch
  writes a batch note, which is deleted when Kafka has the batch; a new owner sends noted batches
  again. A duplicate record is harmless, because the fence accepts one result.
- A queued task whose record is lost, for example by retention, becomes ready again. Before that,
  `proof` shows that no process can still have the record.
- The limits of a type and a key hold: in flight, and starts a second. Between the count and the
  release the tasks in flight can only become fewer, because both go through the session that holds
  the type's lock (`limits`).
- One process releases a type at a time: the session through which releases go holds the type's
  lock. Types are assigned evenly to the replicas (`core.assignment`). A type is transferred without
  records in flight; after the death of its owner, another replica acquires it within two polls
  (`own_retry_s`).
- A row lock, a type or a namespace delays no other: locked tasks are left out and tried again soon
  (`core.locked_tasks`), and each turn of a type is bounded. Topics, lags and slow batches are
  served beside the loop (`topic_opener`, `lag_poller`, `ready_writer`).
- A type whose topic or group Kafka forbids, or that does not answer, is held alone, and tried again
  (`penstock_type_held`). While its lag is unknown, the last known one bounds its release.
- The number of waiting tasks by type, stage and priority is exact at any moment, from maintained
  counters (`backlog_counters`).
- A delayed task is released when it is due by the server's clock, and not before.
- Tasks that ended more than `history_keep_days` ago move to history; expired days of history are
  archived and dropped. One process at a time does this, and releases have precedence (`history`).
- At rest task-sync sends almost no queries: a sweep every `sweep_s` for lost notifications, a round
  of history every `history_every_s`, and with several replicas a poll every `own_retry_s`.

When in doubt, the service begins again in its process, and another replica may take over its types:
when the session or the lock is lost, or when only the client that polls lags has lost Kafka. In an
outage it keeps its types and waits. The process ends when work makes no progress for
`stall_timeout_s` (`stall_detector`).
"""
