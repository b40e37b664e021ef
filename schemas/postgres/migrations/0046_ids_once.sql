-- Sessions that waited to move a sequence of ids moved it back behind ids that others took meanwhile:
-- their statements failed with a duplicate key.

CREATE OR REPLACE FUNCTION penstock.advance_ids() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
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
        -- Another session may have moved the sequence meanwhile, and others take ids from it: setval with
        -- a value from before the wait, or with the last value, would give their ids again.
        clock_us := extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00') * 1000000;
        IF clock_us NOT BETWEEN 0 AND 4503599627370496 THEN
            clock_us := 0;
        END IF;
        ahead := greatest(pg_sequence_last_value('penstock.id_ahead'), 0);
        IF pg_sequence_last_value('penstock.id_server') IS DISTINCT FROM server THEN
            ahead := ahead + minute;
            PERFORM setval('penstock.id_ahead', ahead);
            PERFORM setval(each, greatest(pg_sequence_last_value(each) + minute, clock_us + ahead))
            FROM unnest(ARRAY['penstock.task_id_seq', 'penstock.outbox_id_seq', 'penstock.release_id_seq']::regclass[]) AS each;
            PERFORM setval('penstock.id_server', server);
        ELSIF coalesce(pg_sequence_last_value(ids), 0) <= clock_us + ahead - 1000 THEN
            PERFORM setval(ids, clock_us + ahead);
        END IF;
        PERFORM pg_advisory_unlock(lock);
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        PERFORM pg_advisory_unlock(lock);
        RAISE;
    END;
    RETURN NULL;
END $$;
