-- A target is an address as one namespace calls it: what one namespace's callbacks meet, or its operators say, says nothing of
-- another's. Code from before knows one row for each address, in `target`, which goes with the second step (0024).

-- Of a type, as penstock.core.access has it; goes with the second step, too.
CREATE FUNCTION penstock.namespace_of(type text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN strpos(type, '--') > 1 THEN split_part(type, '--', 1) ELSE 'default' END;

CREATE TABLE penstock.callback_target (
    namespace text COLLATE "C" NOT NULL DEFAULT 'default',
    url text COLLATE "C" NOT NULL,
    state text NOT NULL DEFAULT 'normal' CHECK (state IN ('normal', 'abnormal', 'disabled')),
    why text,
    count integer NOT NULL DEFAULT 0,
    slow_at timestamptz,
    called_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    rate double precision CHECK (rate > 0),
    attempts jsonb NOT NULL DEFAULT '[]',
    owner text,
    changed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (namespace, url)
) WITH (fillfactor = 70);
COMMENT ON TABLE penstock.callback_target IS 'targets of callbacks: their health, whoever judges it, and what operators have said about them';
COMMENT ON COLUMN penstock.callback_target.namespace IS 'of the types whose tasks call it: the beginning of their names';
COMMENT ON COLUMN penstock.callback_target.why IS 'while disabled: what it answered, or what the operator said';
COMMENT ON COLUMN penstock.callback_target.count IS 'slow calls it is charged with: penstock.core.health';
COMMENT ON COLUMN penstock.callback_target.failures IS 'quick failures on end';
COMMENT ON COLUMN penstock.callback_target.rate IS 'most calls a second; NULL is the setting of the callbacks service';
COMMENT ON COLUMN penstock.callback_target.attempts IS 'the last few: at, callback, attempt, took_ms, status, message';
COMMENT ON COLUMN penstock.callback_target.owner IS 'the process that judges it: nobody else''s snapshot is kept';
-- The key is the order for who is confined to a namespace, this for who sees all of them. Those in trouble are found without reading
-- those that are well.
CREATE INDEX callback_target_url ON penstock.callback_target (url, namespace);
CREATE INDEX callback_target_troubled ON penstock.callback_target (url, namespace) WHERE state <> 'normal';
CREATE INDEX callback_target_troubled_of ON penstock.callback_target (namespace, url) WHERE state <> 'normal';

-- Rows there are get the default without being written; those of other namespaces get theirs in 0023. What code from before inserts
-- has none.
ALTER TABLE penstock.callback ADD COLUMN namespace text NOT NULL DEFAULT 'default';
ALTER TABLE penstock.callback ALTER COLUMN namespace DROP DEFAULT;
COMMENT ON COLUMN penstock.callback.namespace IS 'of its task''s type; with the target''s address, whom it is owed to';

CREATE FUNCTION penstock.callback_namespace() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = penstock, pg_temp AS $$
BEGIN
    NEW.namespace := coalesce((SELECT namespace_of(t.type) FROM task t WHERE t.id = NEW.task_id), 'default');
    RETURN NEW;
END $$;
REVOKE EXECUTE ON FUNCTION penstock.callback_namespace() FROM PUBLIC;
CREATE TRIGGER callback_namespace BEFORE INSERT ON penstock.callback
    FOR EACH ROW WHEN (NEW.namespace IS NULL) EXECUTE FUNCTION penstock.callback_namespace();

-- All there are types of.
CREATE FUNCTION penstock.namespaces() RETURNS SETOF text LANGUAGE sql STABLE SET search_path = penstock, pg_temp AS $$
    SELECT DISTINCT namespace_of(name) FROM task_type UNION SELECT 'default' WHERE NOT EXISTS (SELECT FROM task_type)
$$;

-- Between the steps what is kept and said of an address by code from before is carried over to the targets of all namespaces, and
-- what is said by new code (disabled or not, and the rate) to the address: disabled while one namespace has it disabled, and at the
-- lowest rate.
CREATE FUNCTION penstock.target_forth() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = penstock, pg_temp AS $$
DECLARE
    was target := CASE WHEN TG_OP = 'UPDATE' THEN OLD END;
    stopped boolean := (NEW.state = 'disabled') <> coalesce(was.state = 'disabled', false);
    limited boolean := NEW.rate IS DISTINCT FROM was.rate;
BEGIN
    INSERT INTO callback_target AS t (namespace, url, state, why, count, slow_at, called_at, failures, rate, changed_at)
    SELECT n, NEW.url, NEW.state, NEW.why, NEW.count, NEW.slow_at, NEW.called_at, NEW.failures, NEW.rate, NEW.changed_at
    FROM namespaces() n
    WHERE stopped OR limited OR NEW.state <> 'normal' OR NEW.count > 0 OR coalesce(was.count, 0) > 0
    ORDER BY n
    ON CONFLICT (namespace, url) DO UPDATE SET
        state = CASE WHEN stopped THEN excluded.state
                     WHEN t.state = 'disabled' OR NEW.state = 'disabled' THEN t.state
                     ELSE excluded.state END,
        why = CASE WHEN stopped THEN excluded.why ELSE t.why END,
        count = excluded.count, slow_at = excluded.slow_at, called_at = excluded.called_at, failures = excluded.failures,
        rate = CASE WHEN limited THEN excluded.rate ELSE t.rate END,
        changed_at = excluded.changed_at,
        owner = CASE WHEN NOT stopped AND NOT limited THEN t.owner END;
    IF stopped OR limited THEN
        PERFORM pg_notify('penstock_targets', n || ' ' || NEW.url) FROM namespaces() n;
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.target_back() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = penstock, pg_temp AS $$
DECLARE
    was callback_target := CASE WHEN TG_OP = 'UPDATE' THEN OLD END;
    stopped boolean := (NEW.state = 'disabled') <> coalesce(was.state = 'disabled', false);
    disabled boolean;
    least_rate double precision;
BEGIN
    IF NOT stopped AND NEW.rate IS NOT DISTINCT FROM was.rate THEN
        RETURN NULL;
    END IF;
    SELECT bool_or(state = 'disabled'), min(rate) INTO disabled, least_rate FROM callback_target WHERE url = NEW.url;
    INSERT INTO target AS t (url, state, why, rate)
    VALUES (NEW.url, CASE WHEN disabled THEN 'disabled' ELSE 'normal' END, CASE WHEN disabled THEN NEW.why END, least_rate)
    ON CONFLICT (url) DO UPDATE SET
        state = CASE WHEN (t.state = 'disabled') = disabled THEN t.state ELSE excluded.state END,
        why = CASE WHEN NOT disabled THEN NULL ELSE coalesce(t.why, excluded.why) END,
        count = CASE WHEN stopped AND NOT disabled THEN 0 ELSE t.count END,
        rate = excluded.rate, owner = NULL, changed_at = now();
    PERFORM pg_notify('penstock_targets', NEW.url);
    RETURN NULL;
END $$;

REVOKE EXECUTE ON FUNCTION penstock.target_forth(), penstock.target_back() FROM PUBLIC;

-- From here on nobody writes what is not carried over; then what was there. Where several namespaces share an address they all get
-- what was said of it and its charge, and nobody the calls of others; what says nothing comes with the next call.
CREATE TRIGGER target_forth AFTER INSERT OR UPDATE ON penstock.target
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION penstock.target_forth();
INSERT INTO penstock.callback_target (namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, changed_at)
SELECT n.namespace, t.url, t.state, t.why, t.count, t.slow_at, t.called_at, t.failures, t.rate,
       CASE WHEN n.of = 1 THEN t.attempts ELSE '[]' END, t.changed_at
FROM penstock.target t
CROSS JOIN (SELECT namespace, count(*) OVER () AS of FROM penstock.namespaces() AS s (namespace)) n
WHERE n.of = 1 OR t.state <> 'normal' OR t.count > 0 OR t.rate IS NOT NULL;
CREATE TRIGGER target_back AFTER INSERT OR UPDATE ON penstock.callback_target
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION penstock.target_back();
