-- The audit of requests keeps what a request changed. It is stored and shown, and never searched.
ALTER TABLE penstock.audit_request ADD COLUMN change json;
COMMENT ON COLUMN penstock.audit_request.change IS 'what the request changed, without secrets: `before` and `after`, or `request`';
