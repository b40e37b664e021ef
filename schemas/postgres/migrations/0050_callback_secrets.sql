-- Secrets that sign callbacks: of a target, of a namespace (empty url) or of the deployment
-- (namespace *). Before, the setting of the callbacks service signed for all targets, so each
-- receiver could forge callbacks to all others.
CREATE TABLE penstock.callback_secret (
    id text PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    url text COLLATE "C" NOT NULL,
    scheme text NOT NULL CHECK (scheme IN ('v1', 'v1a')),
    key_id text,
    sealed bytea,
    reference text,
    public_key text,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text,
    expires_at timestamptz,
    revoked_at timestamptz,
    wider_until timestamptz,
    replaced_by text,
    CHECK ((sealed IS NULL) = (key_id IS NULL)),
    CHECK (revoked_at IS NOT NULL OR (sealed IS NULL) <> (reference IS NULL)),
    CHECK ((public_key IS NULL) = (scheme = 'v1'))
);
COMMENT ON TABLE penstock.callback_secret IS 'secrets that sign callbacks; the narrowest scope that has valid ones signs';
COMMENT ON COLUMN penstock.callback_secret.namespace IS 'of the targets; * is the deployment';
COMMENT ON COLUMN penstock.callback_secret.url IS 'of the target; empty is every target of the namespace';
COMMENT ON COLUMN penstock.callback_secret.scheme IS 'v1 is HMAC-SHA256, v1a is ed25519';
COMMENT ON COLUMN penstock.callback_secret.key_id IS 'the key of PENSTOCK_ENCRYPTION_KEYS that encrypted it';
COMMENT ON COLUMN penstock.callback_secret.sealed IS 'nonce and ciphertext by AES-256-GCM; id, namespace, url and scheme are associated data';
COMMENT ON COLUMN penstock.callback_secret.reference IS 'the variable or file of the callbacks service that has the secret';
COMMENT ON COLUMN penstock.callback_secret.expires_at IS 'end of the overlap with the secret that replaces it, or its revocation';
COMMENT ON COLUMN penstock.callback_secret.revoked_at IS 'when it was revoked, which also removed the ciphertext';
COMMENT ON COLUMN penstock.callback_secret.wider_until IS 'until then the secrets of the next wider scope sign too';
CREATE UNIQUE INDEX callback_secret_scope ON penstock.callback_secret (namespace, url, id);
