-- For recovery from crashes: the stored request of PHASED handlers, the outbox, and the lock of LOCAL requests.
ALTER TABLE oncekey.record ADD COLUMN request bytea;  -- the stored request, for the completer; NULL after the settlement

-- An attempt that a shutdown interrupts is not counted, so `attempts` may be 0.
ALTER TABLE oncekey.record DROP CONSTRAINT counts_up;
ALTER TABLE oncekey.record ADD CONSTRAINT counts_up CHECK (
    fence >= 1 AND version >= 1 AND attempts >= 0 AND reconcile_tries >= 0);

-- Finds the records that the completer may resume. Heartbeats and steps do not change `created_at`, nor this index.
CREATE INDEX record_resumable ON oncekey.record (created_at)
    WHERE effects = 'phased' AND state IN ('in_progress', 'failed_retryable');

-- The outbox. Debezium's outbox router reads the first five columns by default.
CREATE TABLE oncekey.outbox (
    id             uuid     NOT NULL PRIMARY KEY,
    aggregatetype  text     NOT NULL,  -- the topic; Debezium routes by it
    aggregateid    text     NOT NULL,  -- order_by, or else the record's incarnation; Debezium's message key
    type           text     NOT NULL,  -- the topic again, as the type of the event
    payload        text     NOT NULL,  -- JSON
    kind           text     NOT NULL,
    scope          text     NOT NULL,
    key            text     NOT NULL,
    incarnation    uuid     NOT NULL,  -- of the record that the parcel belongs to
    downstream_key text     NOT NULL,  -- the receiver recognises a repeated delivery by it
    position       integer  NOT NULL,  -- the order among the parcels of one transaction
    order_by       text,
    state          text     NOT NULL,
    attempts       integer  NOT NULL,
    fence          bigint   NOT NULL,  -- raised by each claim; a worker's write must match it
    owner          text,
    lease_until    bigint,
    due_at         bigint   NOT NULL,  -- when a worker may claim it next; while it is held, the end of its lease
    created_at     bigint   NOT NULL,
    first_error    text,
    last_error     text,
    place          bigint   NOT NULL GENERATED ALWAYS AS IDENTITY,  -- the order among parcels with the same order_by
    CONSTRAINT kind_known CHECK (kind IN ('defer', 'emit')),
    CONSTRAINT state_known CHECK (state IN ('ready', 'held')),
    CONSTRAINT held_has_lease CHECK ((state = 'held') = (owner IS NOT NULL AND lease_until IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- Finds due parcels: ready ones, and held ones whose lease has expired.
CREATE INDEX outbox_due ON oncekey.outbox (due_at, place);
-- Finds the first of the parcels with the same order_by.
CREATE INDEX outbox_order ON oncekey.outbox (order_by, place) WHERE order_by IS NOT NULL;
-- Finds the parcels of a record.
CREATE INDEX outbox_incarnation ON oncekey.outbox (incarnation);

-- Dead letters: parcels that failed too often, or whose outcome is unknown, with their first and last error.
CREATE TABLE oncekey.dead_letter (
    id             uuid     NOT NULL PRIMARY KEY,
    aggregatetype  text     NOT NULL,
    aggregateid    text     NOT NULL,
    type           text     NOT NULL,
    payload        text     NOT NULL,
    kind           text     NOT NULL,
    scope          text     NOT NULL,
    key            text     NOT NULL,
    incarnation    uuid     NOT NULL,
    downstream_key text     NOT NULL,
    position       integer  NOT NULL,
    order_by       text,
    attempts       integer  NOT NULL,
    fence          bigint   NOT NULL,
    created_at     bigint   NOT NULL,
    first_error    text,
    last_error     text     NOT NULL,
    died_at        bigint   NOT NULL
);
CREATE INDEX dead_letter_died ON oncekey.dead_letter (died_at, id);
CREATE INDEX dead_letter_incarnation ON oncekey.dead_letter (incarnation);

-- Tries to lock a key for a LOCAL request, then reads its record. In a VOLATILE function each statement has its own
-- snapshot, so the read includes everything that was committed before the lock was free.
-- The time-outs of the transaction are its lease; the server enforces them even if the process or its host is gone.
CREATE FUNCTION oncekey.lock_key(
    lock bigint, in_scope text, in_key text, lease_ms integer, deadline_ms integer,
    OUT locked boolean, OUT begun bigint, OUT seen oncekey.record)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true),
            set_config('idle_in_transaction_session_timeout', lease_ms::text, true),
            set_config('statement_timeout', lease_ms::text, true);
    -- If a client stops within a message, its session is neither idle nor executing: only this time-out ends it.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        PERFORM set_config('transaction_timeout', deadline_ms::text, true);
    END IF;
    locked := pg_try_advisory_xact_lock(lock);
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key;
END
$$;
