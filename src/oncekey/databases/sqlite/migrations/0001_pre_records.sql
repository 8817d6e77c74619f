-- The records of keys. Instants and durations are in microseconds; instants are by the clock of this machine.
CREATE VIEW oncekey_clock AS
SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000 AS now;

CREATE TABLE oncekey_record (
    scope            TEXT     NOT NULL,  -- the caller's namespace and tenant, in an unambiguous encoding
    key              TEXT     NOT NULL,  -- the client's key, byte for byte; it is never interpreted
    incarnation      TEXT     NOT NULL,  -- identifies one life of the key; other tables refer to a record by it
    operation        TEXT     NOT NULL,  -- the name of the protected handler
    effects          TEXT     NOT NULL,  -- stored with the claim: a deployment cannot change what a crash means
    recovery         TEXT     NOT NULL,
    method           TEXT     NOT NULL,
    path             TEXT     NOT NULL,
    fingerprint      TEXT     NOT NULL,  -- hash of the request, with the algorithm's version; it is compared first
    seed             BLOB     NOT NULL,  -- source of the downstream keys; the same for all attempts and owners
    state            TEXT     NOT NULL,
    outcome          TEXT,
    entered          INTEGER  NOT NULL,
    fence            INTEGER  NOT NULL,  -- raised by each new owner; the owner's writes must match incarnation and fence
    version          INTEGER  NOT NULL,  -- raised by each write; writes of others must match incarnation and version
    owner            TEXT,
    lease_until      INTEGER,
    deadline         INTEGER  NOT NULL,  -- the owner does not renew its lease beyond this instant
    call_timeout     INTEGER  NOT NULL,
    ttl              INTEGER  NOT NULL,
    attempts         INTEGER  NOT NULL,
    recovery_point   TEXT     NOT NULL,
    memo             TEXT,               -- the results of the finished steps, in order
    intent           TEXT,               -- the announced external call that has no result yet
    response_status  INTEGER,
    response_headers TEXT,
    response_body    BLOB,               -- bytes, for an exact replay; NULL with a status is a tombstone
    response_schema  INTEGER,
    last_error       TEXT,
    reconcile_after  INTEGER,
    reconcile_tries  INTEGER  NOT NULL,
    created_at       INTEGER  NOT NULL,
    last_run_at      INTEGER  NOT NULL,
    finished_at      INTEGER,
    expires_at       INTEGER  NOT NULL,
    PRIMARY KEY (scope, key),
    CONSTRAINT effects_known CHECK (effects IN ('local', 'phased', 'outbox', 'inline')),
    CONSTRAINT recovery_known CHECK (recovery IN ('retry', 'resume', 'unknown', 'fail')),
    CONSTRAINT state_known CHECK (
        state IN ('pending', 'in_progress', 'completed', 'failed_retryable', 'unknown', 'expired')),
    CONSTRAINT counts_up CHECK (fence >= 1 AND version >= 1 AND attempts >= 1 AND reconcile_tries >= 0),
    CONSTRAINT completed_has_answer CHECK (
        state <> 'completed'
        OR (response_status IS NOT NULL AND response_headers IS NOT NULL AND response_schema IS NOT NULL
            AND outcome IS NOT NULL AND outcome IN ('success', 'failure') AND finished_at IS NOT NULL)),
    CONSTRAINT completed_has_no_intent CHECK (state <> 'completed' OR intent IS NULL),
    CONSTRAINT answer_only_when_done CHECK (
        state IN ('completed', 'expired') OR (response_status IS NULL AND outcome IS NULL)),
    CONSTRAINT owned_in_progress CHECK (
        state <> 'in_progress' OR effects = 'outbox' OR (owner IS NOT NULL AND lease_until IS NOT NULL)),
    CONSTRAINT owned_only_in_progress CHECK (state = 'in_progress' OR (owner IS NULL AND lease_until IS NULL)),
    CONSTRAINT unknown_has_ticket CHECK (state <> 'unknown' OR last_error IS NOT NULL)
) STRICT;
