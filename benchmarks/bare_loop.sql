-- name: create
DROP TABLE IF EXISTS public.bare;
CREATE TABLE public.bare (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    priority    smallint NOT NULL DEFAULT 2,
    state       text NOT NULL DEFAULT 'ready',
    stage       text NOT NULL DEFAULT 'one',
    attempt     integer NOT NULL DEFAULT 0,
    context     bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
) WITH (fillfactor = 70);
CREATE INDEX ON public.bare (priority, id) WHERE state = 'ready';

-- name: submit
WITH inserted AS (INSERT INTO public.bare (context) SELECT unnest($1::bytea[]) RETURNING id)
SELECT count(*), pg_notify('bare_ready', '') FROM inserted;

-- name: release
WITH opened AS (
    UPDATE public.bare SET state = 'queued'
    WHERE id IN (SELECT id FROM public.bare WHERE state = 'ready' ORDER BY priority, id LIMIT $1)
    RETURNING id, stage, attempt, context, priority
)
SELECT * FROM opened ORDER BY priority, id;

-- name: complete
WITH moved AS (
    UPDATE public.bare b
    SET state = CASE WHEN i.next IS NULL THEN 'succeeded' ELSE 'ready' END,
        stage = coalesce(i.next, b.stage),
        context = i.context,
        finished_at = CASE WHEN i.next IS NULL THEN now() END
    FROM unnest($1::bigint[], $2::text[], $3::integer[], $4::text[], $5::bytea[])
         AS i (id, stage, attempt, next, context)
    WHERE b.id = i.id AND b.stage = i.stage AND b.attempt = i.attempt AND b.state = 'queued'
    RETURNING b.id
)
SELECT count(*), pg_notify('bare_ready', '') FROM moved;

-- name: finished
SELECT count(*) FROM public.bare WHERE state = 'succeeded';

-- name: whole
SELECT extract(epoch FROM finished_at)::float8 - (convert_from(context, 'UTF8')::jsonb ->> 'at')::float8 FROM public.bare ORDER BY id;
