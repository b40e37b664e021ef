-- These functions run with the rights of the tables' owner (see roles.sql), so PUBLIC may not
-- execute them.
ALTER FUNCTION penstock.history_open(date) SECURITY DEFINER SET search_path = penstock, pg_temp;
ALTER FUNCTION penstock.history_drop(date, integer, boolean) SECURITY DEFINER SET search_path = penstock, pg_temp;
REVOKE EXECUTE ON FUNCTION penstock.history_open(date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION penstock.history_drop(date, integer, boolean) FROM PUBLIC;
