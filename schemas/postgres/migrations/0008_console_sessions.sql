-- Sessions of the console: who signed in, by API key or by the OpenID Connect provider.

CREATE TABLE penstock.console_session (
    digest bytea NOT NULL,
    key_id text,
    issuer text,
    actor text NOT NULL,
    roles text[] NOT NULL,
    namespaces text[],
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    used_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT console_session_pkey PRIMARY KEY (digest),
    CONSTRAINT console_session_digest_check CHECK ((octet_length(digest) = 32))
);

COMMENT ON TABLE penstock.console_session IS 'sessions of the console; rows without use for 8 hours, or older than 24 hours, are removed';

COMMENT ON COLUMN penstock.console_session.digest IS 'SHA-256 of the token in the cookie';

COMMENT ON COLUMN penstock.console_session.key_id IS 'API key that began the session, which ends with it and has its rights; NULL: a token of the provider did';

COMMENT ON COLUMN penstock.console_session.issuer IS 'provider whose token began the session; it ends when the gateway trusts another one';

COMMENT ON COLUMN penstock.console_session.roles IS 'by the token of the provider; empty for an API key';

CREATE INDEX console_session_used ON penstock.console_session USING btree (used_at);
