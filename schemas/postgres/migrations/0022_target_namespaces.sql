-- A target is a URL as called by one namespace: callbacks and operators of one namespace do not
-- affect the targets of another. The previous release has one row per URL in `target`, which step
-- `post` (0024) drops.

-- The namespace of a type, as in penstock.core.access; step `post` drops the function too.
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
-- The primary key orders the targets of one namespace, this index those of all. The partial index
-- finds targets that are not normal without reading the normal ones.
CREATE INDEX callback_target_url ON penstock.callback_target (url, namespace);
CREATE INDEX callback_target_troubled ON penstock.callback_target (url, namespace) WHERE state <> 'normal';
CREATE INDEX callback_target_troubled_of ON penstock.callback_target (namespace, url) WHERE state <> 'normal';

-- Existing rows get the default without a rewrite, and 0023 sets other namespaces. Inserts of the
-- previous release have none.
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

-- The namespaces of all types.
CREATE FUNCTION penstock.namespaces() RETURNS SETOF text LANGUAGE sql STABLE SET search_path = penstock, pg_temp AS $$
    SELECT DISTINCT namespace_of(name) FROM task_type UNION SELECT 'default' WHERE NOT EXISTS (SELECT FROM task_type)
$$;

-- Between the steps, triggers synchronise both tables. Changes of a URL by the previous release are
-- copied to the targets of all namespaces. Changes by the new release (disabled, health reset,
-- rate) are copied to the URL, which is disabled while one namespace has it disabled, and has the
-- lowest rate. Only changes by the statement itself are copied forth, never values that
-- `target_back` wrote: disable, enable and limit leave no owner, a snapshot leaves its own, and a
-- takeover copies nothing.
--
-- Locks: statements of the previous release lock the row of `target`, then those of
-- `callback_target` in the order of namespaces. Statements of the new release that are copied back
-- (operators, 410) lock one row of `callback_target`, then that of `target`. One of each on the
-- same URL can deadlock. PostgreSQL then aborts one of them: services retry it, and a request is
-- answered 503. Two of the new release cannot deadlock.
CREATE FUNCTION penstock.target_forth() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = penstock, pg_temp AS $$
DECLARE
    was target := CASE WHEN TG_OP = 'UPDATE' THEN OLD END;
    turned boolean := NEW.state <> coalesce(was.state, 'normal');
BEGIN
    IF NEW.owner IS NULL THEN
        IF turned AND NEW.state = 'disabled' THEN
            INSERT INTO callback_target (namespace, url, state, why, changed_at)
            SELECT n, NEW.url, NEW.state, NEW.why, NEW.changed_at FROM namespaces() n ORDER BY n
            ON CONFLICT (namespace, url) DO UPDATE SET
                state = excluded.state, why = excluded.why, owner = NULL, changed_at = excluded.changed_at;
        ELSIF turned THEN
            INSERT INTO callback_target (namespace, url, changed_at)
            SELECT n, NEW.url, NEW.changed_at FROM namespaces() n ORDER BY n
            ON CONFLICT (namespace, url) DO UPDATE SET
                state = 'normal', why = NULL, count = 0, slow_at = NULL, failures = 0, owner = NULL, changed_at = excluded.changed_at;
        ELSE
            INSERT INTO callback_target (namespace, url, rate)
            SELECT n, NEW.url, NEW.rate FROM namespaces() n ORDER BY n
            ON CONFLICT (namespace, url) DO UPDATE SET rate = excluded.rate, owner = NULL;
        END IF;
        PERFORM pg_notify('penstock_targets', n || ' ' || NEW.url) FROM namespaces() n;
    ELSIF TG_OP = 'UPDATE' AND (NEW.state, NEW.count, NEW.slow_at, NEW.called_at, NEW.failures)
                               IS DISTINCT FROM (was.state, was.count, was.slow_at, was.called_at, was.failures) THEN
        -- The count by what it rose or fell, as a target's own may have begun anew, or go on from
        -- more.
        INSERT INTO callback_target AS t (namespace, url, state, count, slow_at, called_at, failures, changed_at)
        SELECT n, NEW.url, CASE NEW.state WHEN 'abnormal' THEN 'abnormal' ELSE 'normal' END,
               NEW.count, NEW.slow_at, NEW.called_at, NEW.failures, NEW.changed_at
        FROM namespaces() n
        WHERE turned OR NEW.state = 'abnormal' OR NEW.count > 0 OR was.count > 0
        ORDER BY n
        ON CONFLICT (namespace, url) DO UPDATE SET
            state = CASE WHEN turned AND t.state <> 'disabled' THEN excluded.state ELSE t.state END,
            count = CASE WHEN NEW.count > was.count THEN greatest(t.count, NEW.count)
                         ELSE greatest(t.count + NEW.count - was.count, 0) END,
            slow_at = CASE WHEN NEW.slow_at IS DISTINCT FROM was.slow_at THEN excluded.slow_at ELSE t.slow_at END,
            called_at = CASE WHEN NEW.called_at IS DISTINCT FROM was.called_at THEN excluded.called_at ELSE t.called_at END,
            failures = CASE WHEN NEW.failures <> was.failures THEN excluded.failures ELSE t.failures END,
            changed_at = CASE WHEN turned AND t.state <> 'disabled' THEN excluded.changed_at ELSE t.changed_at END;
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.target_back() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = penstock, pg_temp AS $$
DECLARE
    was callback_target := CASE WHEN TG_OP = 'UPDATE' THEN OLD END;
    stopped boolean := (NEW.state = 'disabled') <> coalesce(was.state = 'disabled', false);
    -- A snapshot that finds it normal again has an owner.
    begun boolean := coalesce(was.state <> 'normal', false) AND NEW.state = 'normal' AND NEW.owner IS NULL;
    disabled boolean;
    reason text;
    least_rate double precision;
BEGIN
    IF NOT stopped AND NOT begun AND NEW.rate IS NOT DISTINCT FROM was.rate THEN
        RETURN NULL;
    END IF;
    -- Locked first: who comes second sees what the first has said in another namespace.
    INSERT INTO target (url) VALUES (NEW.url) ON CONFLICT (url) DO UPDATE SET owner = NULL;
    SELECT bool_or(state = 'disabled'), (array_agg(why ORDER BY changed_at) FILTER (WHERE state = 'disabled'))[1], min(rate)
    INTO disabled, reason, least_rate
    FROM callback_target WHERE url = NEW.url;
    UPDATE target t SET
        state = CASE WHEN disabled THEN 'disabled' WHEN begun OR t.state = 'disabled' THEN 'normal' ELSE t.state END,
        why = reason,
        count = CASE WHEN begun AND NOT disabled THEN 0 ELSE t.count END,
        slow_at = CASE WHEN begun AND NOT disabled THEN NULL ELSE t.slow_at END,
        failures = CASE WHEN begun AND NOT disabled THEN 0 ELSE t.failures END,
        rate = least_rate, changed_at = now()
    WHERE t.url = NEW.url;
    PERFORM pg_notify('penstock_targets', NEW.url);
    RETURN NULL;
END $$;

REVOKE EXECUTE ON FUNCTION penstock.target_forth(), penstock.target_back() FROM PUBLIC;

-- The triggers now copy every write, so existing rows can be copied. Namespaces that share a URL
-- all get its settings and its count. Other rows are created by the next call.
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
