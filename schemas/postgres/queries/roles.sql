-- The current rights of roles in this database, for comparison with schemas/postgres/roles.sql.

-- name: existing
SELECT rolname::text AS role FROM pg_roles WHERE rolname = ANY ($1::text[]);

-- name: granted
-- One row per right on the schema, a table, a column or a function, and per membership.
-- Partitions inherit their table's rights.
WITH schema AS (
    SELECT oid, nspacl FROM pg_namespace WHERE nspname = 'penstock'
), found AS (
    SELECT a.grantee, a.privilege_type AS privilege, 'SCHEMA penstock'::text AS object, ''::text AS part FROM schema, aclexplode(nspacl) a
    UNION ALL
    SELECT a.grantee, a.privilege_type, c.relname, ''
    FROM schema s JOIN pg_class c ON c.relnamespace = s.oid AND NOT c.relispartition, aclexplode(c.relacl) a
    UNION ALL
    SELECT a.grantee, a.privilege_type, c.relname, t.attname
    FROM schema s JOIN pg_class c ON c.relnamespace = s.oid AND NOT c.relispartition
    JOIN pg_attribute t ON t.attrelid = c.oid AND NOT t.attisdropped, aclexplode(t.attacl) a
    UNION ALL
    SELECT a.grantee, a.privilege_type,
           'FUNCTION ' || p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', ''
    FROM schema s JOIN pg_proc p ON p.pronamespace = s.oid, aclexplode(p.proacl) a
    UNION ALL
    SELECT m.member, '', r.rolname, '' FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
)
SELECT r.rolname::text AS role, f.privilege::text, f.object::text, f.part::text
FROM found f JOIN pg_roles r ON r.oid = f.grantee
WHERE r.rolname = ANY ($1::text[]);

-- name: public_functions
-- SECURITY DEFINER functions that PUBLIC may execute, as after a restore without privileges.
SELECT 'FUNCTION penstock.' || p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' AS object
FROM pg_proc p
WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'penstock') AND p.prosecdef
  AND (p.proacl IS NULL OR EXISTS (
      SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0 AND a.privilege_type = 'EXECUTE'
  ))
ORDER BY 1;

-- name: settings
-- Settings of roles in this database, each as name=value.
SELECT r.rolname::text AS role, unnest(s.setconfig) AS setting
FROM pg_db_role_setting s JOIN pg_roles r ON r.oid = s.setrole
WHERE s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database()) AND r.rolname = ANY ($1::text[]);

-- name: database
SELECT quote_ident(current_database()) AS name;

-- name: user
SELECT current_user::text;

-- name: quoted
SELECT quote_ident($1::text);
