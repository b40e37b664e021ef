"""Task-sync: the gate between the reservoir (PostgreSQL) and the workers (Kafka).

Ingest takes submissions from the topic `submitted` into PostgreSQL; release moves ready tasks of each type to
its topic `ready.<type>`, in order and no more than the window allows.

Guarantees
- A submitted record becomes a task exactly once: its offset is written in the transaction that inserts it.
- A record that breaks its contract lands on `submitted.rejected` with reason, position and original bytes,
  and what is behind it goes on.
- While PostgreSQL is behind, what is in hand of each partition of `submitted` is bounded; beyond, the partition is paused, and read
  on once half of that is in (`core.admission`).
- A ready topic holds no more untaken records than its window: what the workers get done in about a second (measured by a
  sample of what was released), more while they leave nothing of it, between a floor and a ceiling (`core.window`). What
  comes later and is more urgent waits behind no more than that.
- A ready task gets a record on its ready topic at least once. The batch is noted in the statement that opens
  the gate and forgotten when Kafka has it; a new owner sends again what is still noted. A record that is there
  twice is harmless: the fence lets one result take effect.
- A queued task whose record is lost (retention, a topic or a Kafka made anew) is released again, once it is proven
  that nobody can still have it (`proof`).
- No more tasks of a type or key are in flight, and no more start a second, than its limits say: what is counted in the
  session that holds the type's lock can only become less before it releases (`limits`).
- A type is released by one process at a time: the lock lives in the session through which the release goes. Replicas share
  the types evenly (`core.spread`); one is handed over with nothing under way, and taken over within two looks
  (`own_retry_s`) of its owner's death.
- How many tasks wait, by type, stage and priority, is known exactly at any moment without counting them (`counting`).
- A delayed task is released when it is due by the server's clock, and not before.
- What has ended longer ago than `history_keep_days` moves to history, and days of history are archived and dropped, by one process
  at a time and giving way to releases (`history`).
- At rest nobody is asked anything, but for a sweep every `sweep_s`, which finds what a lost notification would have told,
  a look for what has ended every `history_every_s`, and, while there are other replicas, a look every `own_retry_s`.

In doubt it stops: when the session, the lock or Kafka is gone, or work is at hand that does not move for
`stall_timeout_s` (`lookout`), the process ends, and another takes over.
"""
