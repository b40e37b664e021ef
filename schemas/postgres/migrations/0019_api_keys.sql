-- API keys; gateways cache them. Only the SHA-256 of a secret is stored.
CREATE TABLE penstock.api_key (
    id           text PRIMARY KEY,
    name         text NOT NULL,
    digest       bytea NOT NULL CHECK (octet_length(digest) = 32),
    role         text NOT NULL CHECK (role IN ('reader', 'submitter', 'worker', 'operator', 'admin')),
    namespaces   text[] CHECK (cardinality(namespaces) > 0),
    rate         double precision CHECK (rate > 0),
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz,
    replaced_by  text
);
COMMENT ON COLUMN penstock.api_key.digest IS 'SHA-256 of its secret of 256 random bits';
COMMENT ON COLUMN penstock.api_key.namespaces IS 'in which it may do what its role allows; NULL is all of them';
COMMENT ON COLUMN penstock.api_key.rate IS 'requests a second of one gateway; NULL is its setting';
COMMENT ON COLUMN penstock.api_key.last_used_at IS 'noted at most once a minute by each gateway';
COMMENT ON COLUMN penstock.api_key.replaced_by IS 'id of the key that takes its place: both hold until this one expires';

-- The authenticated requester (asked_by is the name in the request), and the namespaces of the
-- operation.
ALTER TABLE penstock.audit ADD COLUMN actor text, ADD COLUMN namespaces text[];
COMMENT ON COLUMN penstock.audit.actor IS 'the key or the subject of the token that asked; NULL where nobody was asked who they are';
COMMENT ON COLUMN penstock.audit.namespaces IS 'those the actor is confined to; NULL is all of them';

-- The audit of requests that may change something, with their responses.
CREATE TABLE penstock.audit_request (
    seq     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT now(),
    actor   text NOT NULL,
    route   text NOT NULL,
    path    text NOT NULL,
    status  smallint NOT NULL,
    remote  text
);
COMMENT ON TABLE penstock.audit_request IS 'what was asked of gateways that ask who it is, questions left out; rows older than PENSTOCK_GATEWAY_AUDIT_DAYS are removed';
COMMENT ON COLUMN penstock.audit_request.route IS 'method and pattern, as in openapi.json';
COMMENT ON COLUMN penstock.audit_request.status IS 'HTTP status of the answer; 499 when the client had gone before it';
CREATE INDEX audit_request_at ON penstock.audit_request (at);
