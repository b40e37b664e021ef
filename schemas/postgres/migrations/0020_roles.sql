-- Who has a right to use them opens and drops days without owning the tables (see roles.sql): so nobody else may.
ALTER FUNCTION penstock.history_open(date) SECURITY DEFINER SET search_path = penstock, pg_temp;
ALTER FUNCTION penstock.history_drop(date, integer, boolean) SECURITY DEFINER SET search_path = penstock, pg_temp;
REVOKE EXECUTE ON FUNCTION penstock.history_open(date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION penstock.history_drop(date, integer, boolean) FROM PUBLIC;
