"""The gateway: the HTTP API for tasks, and the access of HTTP workers to Kafka.

Guarantees
- A response 200 or 201 means that the change is committed in PostgreSQL, 207 that it is for all
  entries of a batch without errors. Each entry of a request is judged alone.
- Requests with the same idempotency key return the same task, also when they race.
- Before `POST /hold_task` answers with a task, Kafka has its claim and the committed offset. A
  record without a request stays in its partition. When the response cannot be written, the gateway
  retries the task at once. When the client disconnects later, it gets the task again if it repeats
  its request under the same key. Otherwise, and after the end of the process, the lease expires
  and the task is retried.
- A task does not wait long at a gateway without a worker for it while another member of the type's
  group could take it.
- What `POST /set_task` accepts is on Kafka with acks=all. The fence decides whether it takes
  effect.
- The bytes of reports on their way to Kafka are bounded. Beyond the bound, reports, heartbeats and
  requests for tasks are answered 429 with `Retry-After`, and have no effect.
- The submissions that wait for PostgreSQL are bounded in tasks, bytes and seconds
  (`core.admission`). Beyond the bound, submissions are answered 429 with `Retry-After`, and have no
  effect.
- A bulk operation has a row before it is answered, and runs until it has ended or is stopped, also
  after a crash. Each task that matches when its batch runs is changed once and counted once.
- With PENSTOCK_GATEWAY_AUTH set, a request needs an API key or token whose role and namespaces
  permit it. Resources of other namespaces are answered like resources that do not exist
  (`gateway.access`, `gateway.visibility`).
- Reads use connections of their own, and one list at a time for each key, so that they delay no
  write (`postgres.read_pool`).
- A client that sends or receives too slowly loses its connection, and connections are bounded
  (`http.connections`).
- Every refusal is a problem document that points at the fault, and reveals no internals.

The gateway accepts tasks while Kafka is unavailable; their release waits. A request that needs an
unavailable server is answered 503 with `Retry-After`. It fails closed: a request that may have had
no effect is never acknowledged, and an idempotency key makes repeating it safe.

When its Kafka producer cannot recover, the gateway begins again in its process.

The gateway listens on a loopback address by default, and beyond loopback only with authentication.
It refuses changes that pages of other sites make a browser send, and requests for other hosts.
"""
