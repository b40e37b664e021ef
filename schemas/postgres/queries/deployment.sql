-- The name of the database.

-- name: id
SELECT id::text FROM deployment;
