-- No id is given twice, also after the database went back to a replica that lagged, a backup or a
-- snapshot: Kafka keeps records with the ids that were lost.

-- Sequences and not columns, because a row would stay locked until the end of a submission:
-- when the server started that gave the last id, in microseconds since 1970, and
CREATE SEQUENCE penstock.id_server;
-- how far ids are ahead of the server's clock, in microseconds.
CREATE SEQUENCE penstock.id_ahead;

-- Moves a sequence of ids up to the microseconds since 2026. Fewer ids than one a microsecond are
-- given, so each id of the past is below. When another server gives ids, they move a minute ahead:
-- its clock may be behind the clock of the server before it.
CREATE FUNCTION penstock.advance_ids() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
DECLARE
    ids CONSTANT regclass := TG_ARGV[0];
    lock CONSTANT bigint := hashtextextended('penstock.ids', 0);
    minute CONSTANT bigint := 60000000;
    server CONSTANT bigint := extract(epoch FROM pg_postmaster_start_time()) * 1000000;
    clock_us bigint := extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00') * 1000000;
    ahead bigint := pg_sequence_last_value('penstock.id_ahead');
BEGIN
    -- JavaScript reads ids below 2^53, which is the year 2311. A clock beyond 2^52 is wrong.
    IF clock_us NOT BETWEEN 0 AND 4503599627370496 THEN
        clock_us := 0;
    END IF;
    -- A millisecond is accepted, since no other server takes over within it. A sequence is not
    -- moved more often.
    IF pg_sequence_last_value('penstock.id_server') = server AND pg_sequence_last_value(ids) > clock_us + ahead - 1000 THEN
        RETURN NULL;
    END IF;
    BEGIN
        -- A session's lock: one of the transaction would make submissions wait for each other.
        PERFORM pg_advisory_lock(lock);
        ahead := greatest(pg_sequence_last_value('penstock.id_ahead'), 0);
        IF pg_sequence_last_value('penstock.id_server') IS DISTINCT FROM server THEN
            ahead := ahead + minute;
            PERFORM setval('penstock.id_ahead', ahead);
            PERFORM setval(each, greatest(pg_sequence_last_value(each) + minute, clock_us + ahead))
            FROM unnest(ARRAY['penstock.task_id_seq', 'penstock.outbox_id_seq', 'penstock.release_id_seq']::regclass[]) AS each;
            PERFORM setval('penstock.id_server', server);
        ELSE
            PERFORM setval(ids, greatest(pg_sequence_last_value(ids), clock_us + ahead));
        END IF;
        PERFORM pg_advisory_unlock(lock);
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        PERFORM pg_advisory_unlock(lock);
        RAISE;
    END;
    RETURN NULL;
END $$;

-- Before a statement and not in the column's default, so that a batch pays for it once, and so that
-- services of earlier releases do, too.
CREATE TRIGGER task_ids BEFORE INSERT ON penstock.task
FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.task_id_seq');
-- A process that outlives the loss deletes the rows whose ids it noted before.
CREATE TRIGGER outbox_ids BEFORE INSERT ON penstock.outbox
FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.outbox_id_seq');
CREATE TRIGGER release_ids BEFORE INSERT ON penstock.release
FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.release_id_seq');
