"""The callbacks service: calls targets on transitions of tasks until delivered or dead.

A record on `callbacks` is one event for one target. It moves through three stages (`pipeline`):

1. `intake`: the `receiver` decodes it, and `target_store` loads its target into `target_cache`.
2. `turn`: the `router` puts the callback into a lane of its path (`lanes`), holds it, or postpones
   it. The `ledger` claims the attempt: it records the attempt's number, and Kafka's record is
   acknowledged. The `caller` signs the callback with the keys that `secret_cache` finds
   (`signing`), and calls the target within the limits of `egress`. A slow call moves to the slow
   pool (`router`). `outcomes` decides by `core.delivery`.
3. `recorder`: the `ledger` records the outcome together with its result, which `results` publishes,
   or that the callback is held or postponed.

A callback that is to be retried waits in PostgreSQL until the `requeuer` publishes its record
again, on `callbacks.diverted`. That path has its own small pool of slots.

A circuit breaker (`core.health`) opens for a target with many slow calls: the target is abnormal.
Callbacks of abnormal and disabled targets are held in PostgreSQL and on no topic. The `Drainer`
makes some of them due: one as a probe while the target hangs, then at a bounded rate
(`core.drain`). They take the diverted path too.

Callbacks that a normal target cannot receive soon, at its pace or rate, are held as well. The
`QueueReader` reads them when there is room, and they take the normal path in their order.

Guarantees
- A callback is delivered, scheduled, held, or dead with its reason on `callbacks.dead`. All its
  attempts carry one webhook-id, and each is numbered before it is made. Its outcome is recorded in
  PostgreSQL first, and then published on `callbacks.results`: no state of Kafka causes a call.
- A record that arrives twice, late or after a rebalance causes no second call: the claim compares
  the attempt's number.
- The narrowest scope with secrets signs: the target's, the namespace's, the deployment's. If none
  of its secrets can be used, the target is not called.
- The service connects only to public and allowed addresses (`egress`). An answer costs at most its
  timeout and a few kilobytes (`caller`).
- A target that hangs uses a few slots only, and none once it is known to be slow. Callbacks that
  would wait too long for it are held, and cost three updates of their row until delivered.
- A host with a URL per task is bounded as a whole: in slots, in slow calls, and by a circuit
  breaker that diverts all its targets (`hosts`, `host_slots`). Names and ports of one server gain
  nothing.
- A namespace whose addresses hang leaves slots of each pool to the others (`core.fair_share`).
  Namespaces take turns wherever their callbacks queue.
- A target is one URL in one namespace (`core.target`). Its health, rate, slots and
  operators' decisions are its own.
- One process owns a target: the one whose partition has its records. Its health survives that
  process. Records are keyed by the URL alone, so one process owns a URL in all namespaces.
- A failure in self-check mode uses up no schedule.
- A target's rate holds over both paths together (`core.call_pacer`); a new process starts it anew.
- Ordered callbacks are called one after the other, each when the one before is delivered or dead.

What a crash does
- Before the claim: the record is delivered again. No callback is lost or doubled.
- After the claim, before or during the call: the requeuer publishes the callback once the horizon
  has passed. A record that is delivered again finds its attempt claimed. The target may receive the
  callback twice, with the same webhook-id.
- After the call, before its outcome is recorded: the same, so a delivered callback may be delivered
  again.
- After its outcome is recorded: the sweeper publishes its result, and its letter on
  `callbacks.dead`. Either topic may have two records of one id.
- In the requeuer, between its statement and its records: the callbacks become due again.
- One second of slow calls may be lost from a target's count.

When in doubt, it calls again.
"""
