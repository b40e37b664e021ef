-- Definitions of flows. A version is never changed and never deleted.

-- name: lock
-- One process at a time adds a definition with child flows, until the end of its transaction. Two
-- that were validated side by side could contain each other.
SELECT pg_advisory_xact_lock(hashtextextended('penstock.flow_definitions', 0));

-- name: insert
INSERT INTO flow_definition (name, version, definition, created_by) VALUES ($name, $version, $definition::json, $created_by)
ON CONFLICT (name, version) DO NOTHING
RETURNING name, version, definition, created_at, created_by;

-- name: get
SELECT name, version, definition, created_at, created_by FROM flow_definition WHERE name = $1 AND version = $2;

-- name: get_newest
SELECT name, version, definition, created_at, created_by FROM flow_definition
WHERE name = $1 ORDER BY version DESC LIMIT 1;

-- name: many
SELECT d.definition
FROM unnest($1::text[], $2::integer[]) AS k (name, version)
CROSS JOIN LATERAL (SELECT definition FROM flow_definition WHERE name = k.name AND version = k.version OFFSET 0) AS d;

-- name: newest
-- The newest version of each name.
SELECT k.name, d.version
FROM unnest($1::text[]) AS k (name),
     LATERAL (SELECT version FROM flow_definition WHERE name = k.name ORDER BY version DESC LIMIT 1) AS d;

-- name: versions
-- Newest first, from below version $2.
SELECT version, definition->>'description' AS description, created_at, created_by
FROM flow_definition WHERE name = $1 AND ($2::integer IS NULL OR version < $2) ORDER BY version DESC LIMIT $3;

-- name: names
-- Behind the name $1, of the namespaces $2.
SELECT name, max(version) AS version, count(*) AS versions, max(created_at) AS created_at
FROM flow_definition
WHERE ($1::text IS NULL OR name > $1)
  AND ($2::text[] IS NULL
       OR CASE WHEN strpos(name, '--') > 1 THEN split_part(name, '--', 1) ELSE 'default' END = ANY ($2))
GROUP BY name ORDER BY name LIMIT $3;
