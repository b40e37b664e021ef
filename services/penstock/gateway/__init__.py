"""The gateway: tasks in and out over HTTP, and work for workers that do not speak Kafka.

Guarantees
- Answered with 200 or 201 means committed in PostgreSQL. A batch is inserted whole or not at all.
- A repeated idempotency key returns the first task, also to requests that race.
- A task handed out by `POST /hold_task` was claimed on Kafka, and its offset committed, before the answer is
  sent; what nobody was there to take stays in its partition. When the answer cannot be written, the task is handed back at
  once; a client that goes away later loses its lease in time, and the task is tried again.
- No task waits for long with a gateway that has no worker for it while another member of the type's group could take it.
- What `POST /set_task` accepts is on Kafka with acks=all; whether it takes effect is the fence's decision.
- What is on its way to Kafka for HTTP workers is bounded: beyond, reports, beats and requests for work are answered
  429 with `Retry-After`, and nothing of them was done.
- What waits for PostgreSQL to be submitted is bounded, in tasks, bytes and seconds (`core.admission`): beyond, submissions are
  answered 429 with `Retry-After`, and nothing of them was done.
- An operation by filter is written down before it is answered and goes on until it has ended or is stopped, whoever dies; each task
  that matches when its turn comes is changed once and counted once in the audit.
- Where PENSTOCK_GATEWAY_AUTH is set, nobody does anything without a key or token whose role and namespaces allow it; what belongs to
  foreign namespaces is answered as what does not exist (`gateway.access`, `gateway.ownership`).
- Every refusal is a problem document that points at the field; no internals leave the process.

It takes tasks while Kafka is away (their release waits), and answers 503 with `Retry-After` to what needs a
server that is away. In doubt it refuses: a request that may not have taken effect is never acknowledged, and
the client's idempotency key makes repeating it safe.

A producer that is broken for good ends the process, whoever met it: its supervisor starts another.

It listens on loopback unless told otherwise, beyond that only with authentication, and refuses what pages of other sites make
browsers send. Who asks and cannot be checked is refused.
"""
