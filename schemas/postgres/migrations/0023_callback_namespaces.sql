-- By itself, so that 0022 does not hold its locks for as long as this takes.
UPDATE penstock.callback c
SET namespace = penstock.namespace_of(t.type)
FROM penstock.task t
WHERE t.id = c.task_id AND strpos(t.type, '--') > 1;

-- What is held, and what is dead, of one namespace; those without it serve who sees all.
CREATE INDEX callback_held_of ON penstock.callback (namespace, target, seq) WHERE state = 'held';
CREATE INDEX callback_dead_of ON penstock.callback (namespace, target, seq) WHERE state = 'dead';
