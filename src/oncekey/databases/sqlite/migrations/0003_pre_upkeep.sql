-- Where sweepers and reapers look, and what the audit keeps.
CREATE INDEX oncekey_record_running ON oncekey_record (created_at, scope, key) WHERE state = 'in_progress';
CREATE INDEX oncekey_record_expiring ON oncekey_record (expires_at, scope, key)
    WHERE state IN ('completed', 'failed_retryable', 'pending');
CREATE INDEX oncekey_record_expired ON oncekey_record (expires_at, scope, key) WHERE state = 'expired';

-- Every move of a record that its own request did not make: only added to, and forgotten after a time of its own.
-- Lines are about an incarnation, so they outlive its record. The key is kept as its digest only.
CREATE TABLE oncekey_audit (
    id          INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,
    at          INTEGER  NOT NULL,
    scope       TEXT     NOT NULL,
    key_digest  TEXT     NOT NULL,
    incarnation TEXT     NOT NULL,
    operation   TEXT     NOT NULL,
    fence       INTEGER  NOT NULL,
    source      TEXT,              -- NULL is "no row"
    target      TEXT,              -- NULL is "no row"
    trigger     TEXT     NOT NULL,
    actor       TEXT     NOT NULL,  -- which part was played
    who         TEXT     NOT NULL,  -- by which process or person
    why         TEXT     NOT NULL
) STRICT;
CREATE INDEX oncekey_audit_key ON oncekey_audit (scope, key_digest, id);
