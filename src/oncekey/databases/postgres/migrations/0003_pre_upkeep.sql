-- Where sweepers and reapers look, and what the audit keeps.
-- Nothing that a heartbeat writes is in these indexes, so that renewals stay heap-only updates.
CREATE INDEX record_running ON oncekey.record (created_at, scope, key) WHERE state = 'in_progress';
CREATE INDEX record_expiring ON oncekey.record (expires_at, scope, key)
    WHERE state IN ('completed', 'failed_retryable', 'pending');
CREATE INDEX record_expired ON oncekey.record (expires_at, scope, key) WHERE state = 'expired';

-- Every move of a record that its own request did not make: only added to, and forgotten after a time of its own.
-- Lines are about an incarnation, so they outlive its record. The key is kept as its digest only.
CREATE TABLE oncekey.audit (
    id          bigint  NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          bigint  NOT NULL,
    scope       text    NOT NULL,
    key_digest  text    NOT NULL,
    incarnation uuid    NOT NULL,
    operation   text    NOT NULL,
    fence       bigint  NOT NULL,
    source      text,              -- NULL is "no row"
    target      text,              -- NULL is "no row"
    trigger     text    NOT NULL,
    actor       text    NOT NULL,  -- which part was played
    who         text    NOT NULL,  -- by which process or person
    why         text    NOT NULL
);
CREATE INDEX audit_key ON oncekey.audit (scope, key_digest, id);
