-- For recovery from crashes: the stored request of PHASED handlers, and the outbox.
-- An attempt that a shutdown interrupts is not counted, so `attempts` may be 0. SQLite cannot change a constraint, so
-- the table is recreated.
CREATE TABLE oncekey_record_2 (
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
    request          BLOB,               -- the stored request, for the completer; NULL after the settlement
    PRIMARY KEY (scope, key),
    CONSTRAINT effects_known CHECK (effects IN ('local', 'phased', 'outbox', 'inline')),
    CONSTRAINT recovery_known CHECK (recovery IN ('retry', 'resume', 'unknown', 'fail')),
    CONSTRAINT state_known CHECK (
        state IN ('pending', 'in_progress', 'completed', 'failed_retryable', 'unknown', 'expired')),
    CONSTRAINT counts_up CHECK (fence >= 1 AND version >= 1 AND attempts >= 0 AND reconcile_tries >= 0),
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

INSERT INTO oncekey_record_2 (
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed, state, outcome,
    entered, fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts, recovery_point,
    memo, intent, response_status, response_headers, response_body, response_schema, last_error,
    reconcile_after, reconcile_tries, created_at, last_run_at, finished_at, expires_at)
SELECT
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed, state, outcome,
    entered, fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts, recovery_point,
    memo, intent, response_status, response_headers, response_body, response_schema, last_error,
    reconcile_after, reconcile_tries, created_at, last_run_at, finished_at, expires_at
FROM oncekey_record;
DROP TABLE oncekey_record;
ALTER TABLE oncekey_record_2 RENAME TO oncekey_record;

-- Finds the records that the completer may resume.
CREATE INDEX oncekey_record_resumable ON oncekey_record (created_at)
    WHERE effects = 'phased' AND state IN ('in_progress', 'failed_retryable');

-- The outbox. Debezium's outbox router reads the first five columns by default.
CREATE TABLE oncekey_outbox (
    id             TEXT     NOT NULL UNIQUE,
    aggregatetype  TEXT     NOT NULL,  -- the topic; Debezium routes by it
    aggregateid    TEXT     NOT NULL,  -- order_by, or else the record's incarnation; Debezium's message key
    type           TEXT     NOT NULL,  -- the topic again, as the type of the event
    payload        TEXT     NOT NULL,  -- JSON
    kind           TEXT     NOT NULL,
    scope          TEXT     NOT NULL,
    key            TEXT     NOT NULL,
    incarnation    TEXT     NOT NULL,  -- of the record that the parcel belongs to
    downstream_key TEXT     NOT NULL,  -- the receiver recognises a repeated delivery by it
    position       INTEGER  NOT NULL,  -- the order among the parcels of one transaction
    order_by       TEXT,
    state          TEXT     NOT NULL,
    attempts       INTEGER  NOT NULL,
    fence          INTEGER  NOT NULL,  -- raised by each claim; a worker's write must match it
    owner          TEXT,
    lease_until    INTEGER,
    due_at         INTEGER  NOT NULL,  -- when a worker may claim it next; while it is held, the end of its lease
    created_at     INTEGER  NOT NULL,
    first_error    TEXT,
    last_error     TEXT,
    place          INTEGER  NOT NULL PRIMARY KEY,  -- the order among parcels with the same order_by
    CONSTRAINT kind_known CHECK (kind IN ('defer', 'emit')),
    CONSTRAINT state_known CHECK (state IN ('ready', 'held')),
    CONSTRAINT held_has_lease CHECK ((state = 'held') = (owner IS NOT NULL AND lease_until IS NOT NULL))
) STRICT;

-- Finds due parcels: ready ones, and held ones whose lease has expired.
CREATE INDEX oncekey_outbox_due ON oncekey_outbox (due_at, place);
-- Finds the first of the parcels with the same order_by.
CREATE INDEX oncekey_outbox_order ON oncekey_outbox (order_by, place) WHERE order_by IS NOT NULL;
-- Finds the parcels of a record.
CREATE INDEX oncekey_outbox_incarnation ON oncekey_outbox (incarnation);

-- Dead letters: parcels that failed too often, or whose outcome is unknown, with their first and last error.
CREATE TABLE oncekey_dead_letter (
    id             TEXT     NOT NULL PRIMARY KEY,
    aggregatetype  TEXT     NOT NULL,
    aggregateid    TEXT     NOT NULL,
    type           TEXT     NOT NULL,
    payload        TEXT     NOT NULL,
    kind           TEXT     NOT NULL,
    scope          TEXT     NOT NULL,
    key            TEXT     NOT NULL,
    incarnation    TEXT     NOT NULL,
    downstream_key TEXT     NOT NULL,
    position       INTEGER  NOT NULL,
    order_by       TEXT,
    attempts       INTEGER  NOT NULL,
    fence          INTEGER  NOT NULL,
    created_at     INTEGER  NOT NULL,
    first_error    TEXT,
    last_error     TEXT     NOT NULL,
    died_at        INTEGER  NOT NULL
) STRICT;
CREATE INDEX oncekey_dead_letter_died ON oncekey_dead_letter (died_at, id);
CREATE INDEX oncekey_dead_letter_incarnation ON oncekey_dead_letter (incarnation);
