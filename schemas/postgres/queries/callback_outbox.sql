-- The outbox of the callbacks service: records of ended callbacks that are written with the outcome
-- and not on their topic yet. `callbacks.record_outcomes` fills it.

-- name: enqueue
-- Enqueues the records of callbacks that ended without an attempt.
INSERT INTO callback_outbox (id, topic, keys, records) VALUES ($id, $topic, $keys::bytea[], $records::bytea[]);

-- name: unpublished
-- Rows of a topic that are older than $2 seconds: their writer has died, or the topic took nothing.
SELECT id, topic, keys, records FROM callback_outbox
WHERE topic = $1 AND refused IS NULL AND created_at < now() - make_interval(secs => $2) ORDER BY created_at LIMIT $3;

-- name: refused
-- Rows of a topic behind an id whose records Kafka has refused.
SELECT id, topic, keys, records FROM callback_outbox
WHERE topic = $1 AND refused IS NOT NULL AND id > $2 ORDER BY id LIMIT $3;

-- name: park
-- Keeps the records of a row that Kafka refuses, with its reason.
UPDATE callback_outbox SET keys = $keys::bytea[], records = $records::bytea[], refused = $refused WHERE id = $id;

-- name: delete_published
-- The sweeper publishes rows again that another transaction locks now.
DELETE FROM callback_outbox
WHERE id = ANY (ARRAY(SELECT id FROM callback_outbox WHERE id = ANY ($1::uuid[]) ORDER BY id FOR UPDATE SKIP LOCKED));
