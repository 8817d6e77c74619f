-- What a crash must not lose: the request of a phased handler, the outbox, and the lock of LOCAL in one commit.
ALTER TABLE oncekey.record ADD COLUMN request bytea;  -- as a completer repeats it; gone with the settlement

-- An attempt that a stop interrupted is given back, so the first one may count as none.
ALTER TABLE oncekey.record DROP CONSTRAINT counts_up;
ALTER TABLE oncekey.record ADD CONSTRAINT counts_up CHECK (
    fence >= 1 AND version >= 1 AND attempts >= 0 AND reconcile_tries >= 0);

-- Where a completer looks. The instant never changes, so neither heartbeats nor phases touch the index.
CREATE INDEX record_resumable ON oncekey.record (created_at)
    WHERE effects = 'phased' AND state IN ('in_progress', 'failed_retryable');

-- The outbox. The first five columns are those that Debezium's outbox router reads by default.
CREATE TABLE oncekey.outbox (
    id             uuid     NOT NULL PRIMARY KEY,
    aggregatetype  text     NOT NULL,  -- the topic: Debezium routes by it
    aggregateid    text     NOT NULL,  -- what is ordered by, else the record's incarnation: Debezium's message key
    type           text     NOT NULL,  -- the topic once more, as the event's type
    payload        text     NOT NULL,  -- JSON
    kind           text     NOT NULL,
    scope          text     NOT NULL,
    key            text     NOT NULL,
    incarnation    uuid     NOT NULL,  -- the life of the key that the parcel belongs to
    downstream_key text     NOT NULL,  -- for the receiver to recognise a repetition by
    position       integer  NOT NULL,  -- among the parcels of one transaction
    order_by       text,
    state          text     NOT NULL,
    attempts       integer  NOT NULL,
    fence          bigint   NOT NULL,  -- up with each claim; a worker proves it
    owner          text,
    lease_until    bigint,
    due_at         bigint   NOT NULL,  -- when somebody may take it next; while it is held, the end of its lease
    created_at     bigint   NOT NULL,
    first_error    text,
    last_error     text,
    place          bigint   NOT NULL GENERATED ALWAYS AS IDENTITY,  -- in the line of those with the same order_by
    CONSTRAINT kind_known CHECK (kind IN ('defer', 'emit')),
    CONSTRAINT state_known CHECK (state IN ('ready', 'held')),
    CONSTRAINT held_has_lease CHECK ((state = 'held') = (owner IS NOT NULL AND lease_until IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- What is due next, ready or with a lease that ran out.
CREATE INDEX outbox_due ON oncekey.outbox (due_at, place);
-- Who is first of those that keep an order.
CREATE INDEX outbox_order ON oncekey.outbox (order_by, place) WHERE order_by IS NOT NULL;
-- The parcel of a record.
CREATE INDEX outbox_incarnation ON oncekey.outbox (incarnation);

-- Parcels that were tried too often, or whose outcome nobody knows; with the first and the last error.
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

-- The lock of LOCAL in one commit, and the record as it is once the lock was tried: inside a VOLATILE function each
-- statement has a snapshot of its own, so nothing that was committed before the lock was free stays unseen.
-- The transaction's own time-outs are its lease; the server keeps them if the process or its host is gone.
CREATE FUNCTION oncekey.lock_key(
    lock bigint, in_scope text, in_key text, lease_ms integer, deadline_ms integer,
    OUT locked boolean, OUT begun bigint, OUT seen oncekey.record)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true),
            set_config('idle_in_transaction_session_timeout', lease_ms::text, true),
            set_config('statement_timeout', lease_ms::text, true);
    -- A client that falls silent in the middle of a message is neither idle nor executing: only this ends it.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        PERFORM set_config('transaction_timeout', deadline_ms::text, true);
    END IF;
    locked := pg_try_advisory_xact_lock(lock);
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key;
END
$$;
