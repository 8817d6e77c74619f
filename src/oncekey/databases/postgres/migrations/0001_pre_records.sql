-- The records of keys. Instants and durations are in microseconds; instants are clock_timestamp() of this server. No
-- index contains a column that heartbeats write, so that renewals stay heap-only updates.
CREATE SCHEMA IF NOT EXISTS oncekey;

CREATE TABLE oncekey.record (
    scope            text     NOT NULL,  -- the caller's namespace and tenant, in an unambiguous encoding
    key              text     NOT NULL,  -- the client's key, byte for byte; it is never interpreted
    incarnation      uuid     NOT NULL,  -- identifies one life of the key; other tables refer to a record by it
    operation        text     NOT NULL,  -- the name of the protected handler
    effects          text     NOT NULL,  -- stored with the claim: a deployment cannot change what a crash means
    recovery         text     NOT NULL,
    method           text     NOT NULL,
    path             text     NOT NULL,
    fingerprint      text     NOT NULL,  -- hash of the request, with the algorithm's version; it is compared first
    seed             bytea    NOT NULL,  -- source of the downstream keys; the same for all attempts and owners
    state            text     NOT NULL,
    outcome          text,
    entered          boolean  NOT NULL,
    fence            bigint   NOT NULL,  -- raised by each new owner; the owner's writes must match incarnation and fence
    version          bigint   NOT NULL,  -- raised by each write; writes of others must match incarnation and version
    owner            text,
    lease_until      bigint,
    deadline         bigint   NOT NULL,  -- the owner does not renew its lease beyond this instant
    call_timeout     bigint   NOT NULL,
    ttl              bigint   NOT NULL,
    attempts         integer  NOT NULL,
    recovery_point   text     NOT NULL,
    memo             text,               -- the results of the finished steps, in order
    intent           text,               -- the announced external call that has no result yet
    response_status  integer,
    response_headers text,
    response_body    bytea,              -- bytes, not jsonb, for an exact replay; NULL with a status is a tombstone
    response_schema  integer,
    last_error       text,
    reconcile_after  bigint,
    reconcile_tries  integer  NOT NULL,
    created_at       bigint   NOT NULL,
    last_run_at      bigint   NOT NULL,
    finished_at      bigint,
    expires_at       bigint   NOT NULL,
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
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
