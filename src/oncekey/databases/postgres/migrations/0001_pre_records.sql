-- The records of keys. Instants and durations are microseconds; instants are this server's clock_timestamp().
-- Nothing that a heartbeat writes is indexed, so that renewals stay heap-only updates.
CREATE SCHEMA IF NOT EXISTS oncekey;

CREATE TABLE oncekey.record (
    scope            text     NOT NULL,  -- who: namespace and tenant, in one injective text
    key              text     NOT NULL,  -- the client's key, opaque, byte-exact
    incarnation      uuid     NOT NULL,  -- this life of the key; everything that hangs on a record hangs on it
    operation        text     NOT NULL,  -- the enrolled handler
    effects          text     NOT NULL,  -- what a crash means is stored with the claim, so a deploy cannot change it
    recovery         text     NOT NULL,
    method           text     NOT NULL,
    path             text     NOT NULL,
    fingerprint      text     NOT NULL,  -- of the request, with its algorithm's version; compared before anything else
    seed             bytea    NOT NULL,  -- downstream keys are derived from it, over attempts and take-overs
    state            text     NOT NULL,
    outcome          text,
    entered          boolean  NOT NULL,
    fence            bigint   NOT NULL,  -- up with each new owner; owners prove incarnation and fence
    version          bigint   NOT NULL,  -- up with each write; strangers prove incarnation and version
    owner            text,
    lease_until      bigint,
    deadline         bigint   NOT NULL,  -- the heartbeat stops here
    call_timeout     bigint   NOT NULL,
    ttl              bigint   NOT NULL,
    attempts         integer  NOT NULL,
    recovery_point   text     NOT NULL,
    memo             text,               -- finished phases, in order
    intent           text,               -- the announced outside call that has no result yet
    response_status  integer,
    response_headers text,
    response_body    bytea,              -- bytes, never jsonb: a replay is byte for byte; NULL with a status is a tombstone
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
