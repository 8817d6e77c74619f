-- Indexes for the sweeper (records in progress) and the reaper (expiring and expired records), and the audit.
CREATE INDEX oncekey_record_running ON oncekey_record (created_at, scope, key) WHERE state = 'in_progress';
CREATE INDEX oncekey_record_expiring ON oncekey_record (expires_at, scope, key)
    WHERE state IN ('completed', 'failed_retryable', 'pending');
CREATE INDEX oncekey_record_expired ON oncekey_record (expires_at, scope, key) WHERE state = 'expired';

-- The audit: changes to records that their own request did not make. Lines are only added, and have a separate retention
-- time. They refer to an incarnation, so they outlive its record, and contain a digest of the key, not the key.
CREATE TABLE oncekey_audit (
    id          INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,
    at          INTEGER  NOT NULL,
    scope       TEXT     NOT NULL,
    key_digest  TEXT     NOT NULL,
    incarnation TEXT     NOT NULL,
    operation   TEXT     NOT NULL,
    fence       INTEGER  NOT NULL,
    source      TEXT,              -- the state before; NULL: no record
    target      TEXT,              -- the state after; NULL: no record
    trigger     TEXT     NOT NULL,
    actor       TEXT     NOT NULL,  -- the role, such as sweeper or operator
    who         TEXT     NOT NULL,  -- the process or person in this role
    why         TEXT     NOT NULL
) STRICT;
CREATE INDEX oncekey_audit_key ON oncekey_audit (scope, key_digest, id);
