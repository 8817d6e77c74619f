-- Indexes for the sweeper (records in progress) and the reaper (expiring and expired records), and the audit.
-- No index contains a column that heartbeats write, so that renewals stay heap-only updates.
CREATE INDEX record_running ON oncekey.record (created_at, scope, key) WHERE state = 'in_progress';
CREATE INDEX record_expiring ON oncekey.record (expires_at, scope, key)
    WHERE state IN ('completed', 'failed_retryable', 'pending');
CREATE INDEX record_expired ON oncekey.record (expires_at, scope, key) WHERE state = 'expired';

-- The audit: changes to records that their own request did not make. Lines are only added, and have a separate retention
-- time. They refer to an incarnation, so they outlive its record, and contain a digest of the key, not the key.
CREATE TABLE oncekey.audit (
    id          bigint  NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          bigint  NOT NULL,
    scope       text    NOT NULL,
    key_digest  text    NOT NULL,
    incarnation uuid    NOT NULL,
    operation   text    NOT NULL,
    fence       bigint  NOT NULL,
    source      text,              -- the state before; NULL: no record
    target      text,              -- the state after; NULL: no record
    trigger     text    NOT NULL,
    actor       text    NOT NULL,  -- the role, such as sweeper or operator
    who         text    NOT NULL,  -- the process or person in this role
    why         text    NOT NULL
);
CREATE INDEX audit_key ON oncekey.audit (scope, key_digest, id);
