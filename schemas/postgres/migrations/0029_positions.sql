-- The identity of the log that an ingest offset belongs to. A topic may be deleted and created
-- again, or lose its tail: then the same offset names another record. A service without this column
-- moves the offset and leaves the identity, which names its offset and is ignored then.
ALTER TABLE penstock.ingested ADD COLUMN identity text;

COMMENT ON COLUMN penstock.ingested.identity IS 'of the record before next_offset: topic id/leader epoch/checksum@offset';

-- Offsets that did not fit their topic: what check reports. A few rows in the life of a deployment.
CREATE TABLE penstock.position_reset (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic        text NOT NULL,
    partition    integer NOT NULL,
    reason       text NOT NULL,
    stored       bigint NOT NULL,
    resumed      bigint NOT NULL,
    deleted      bigint NOT NULL DEFAULT 0,
    moved_at     timestamptz NOT NULL DEFAULT now(),
    noted_at     timestamptz
);

COMMENT ON COLUMN penstock.position_reset.reason IS 'replaced, cut or deleted';
COMMENT ON COLUMN penstock.position_reset.deleted IS 'records that were deleted before they were ingested';
COMMENT ON COLUMN penstock.position_reset.noted_at IS 'when an operator took note of the deleted records';
