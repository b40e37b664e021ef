-- A migration of its own, so that 0022 does not hold its locks for this long.
UPDATE penstock.callback c
SET namespace = penstock.namespace_of(t.type)
FROM penstock.task t
WHERE t.id = c.task_id AND strpos(t.type, '--') > 1;

-- Held and dead callbacks of one namespace; the indexes without namespace serve queries of all.
CREATE INDEX callback_held_of ON penstock.callback (namespace, target, seq) WHERE state = 'held';
CREATE INDEX callback_dead_of ON penstock.callback (namespace, target, seq) WHERE state = 'dead';
