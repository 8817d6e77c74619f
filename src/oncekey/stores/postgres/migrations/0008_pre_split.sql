-- What only unfinished, failed or phased work has gets a row of its own, so that the row that every key has stays small and
-- is written with one check. Quick: nothing is read but unfinished records. Older code may go on beside it: until 0009 two
-- triggers keep its columns and the new table equal.

CREATE TABLE oncekey.work (
    incarnation      uuid     NOT NULL PRIMARY KEY,  -- the life of the key that it belongs to
    scope            text     NOT NULL,
    key              text     NOT NULL,
    memo_version     bigint   NOT NULL DEFAULT 0,  -- as the record has it: else the two were not read together
    memo             text,                         -- finished phases, in order
    intent           text,                         -- the announced outside call that has no result yet
    request          bytea,                        -- as a completer repeats it; gone with the settlement
    reconcile_after  bigint,
    reconcile_tries  integer  NOT NULL DEFAULT 0,
    CONSTRAINT memo_has_version CHECK ((memo_version > 0) = (memo IS NOT NULL OR intent IS NOT NULL)),
    CONSTRAINT tries_count_up CHECK (reconcile_tries >= 0)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
-- Where a reconciler looks.
CREATE INDEX work_due ON oncekey.work (reconcile_after, scope, key) WHERE reconcile_after IS NOT NULL;

-- The version of the record at which its memo or intent was last written; 0: it has neither; below: no row of its own yet.
-- Who finds a row of `work` that does not fit read it before the record was locked, and must not write by it.
ALTER TABLE oncekey.record ADD COLUMN memo_version bigint NOT NULL DEFAULT -1;
ALTER TABLE oncekey.record ALTER COLUMN reconcile_tries SET DEFAULT 0;

-- Every statement that writes the table compiles its checks anew. This one stays; the others are in the contract that every
-- store must pass, and `oncekey doctor` looks for rows that break them. Older rows passed stricter ones, so none is read.
ALTER TABLE oncekey.record
    DROP CONSTRAINT effects_known, DROP CONSTRAINT recovery_known, DROP CONSTRAINT state_known, DROP CONSTRAINT counts_up,
    DROP CONSTRAINT completed_has_answer, DROP CONSTRAINT completed_has_no_intent, DROP CONSTRAINT answer_only_when_done,
    DROP CONSTRAINT owned_in_progress, DROP CONSTRAINT owned_only_in_progress, DROP CONSTRAINT unknown_has_ticket,
    ADD CONSTRAINT completed_has_answer CHECK (
        state <> 'completed'
        OR num_nulls(response_status, response_headers, response_schema, outcome, finished_at) = 0) NOT VALID;

-- A record with all that belongs to it. Until 0009 the record's own columns have it.
CREATE VIEW oncekey.whole AS
SELECT record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery, record.method,
       record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered, record.fence,
       record.version, record.owner, record.lease_until, record.deadline, record.call_timeout, record.ttl, record.attempts,
       record.recovery_point, record.response_status, record.response_headers, record.response_body,
       record.response_schema, record.last_error, record.created_at, record.last_run_at, record.finished_at,
       record.expires_at,
       record.memo, record.intent, record.request, record.reconcile_after, record.reconcile_tries
FROM oncekey.record AS record;

-- The record, locked, with what belongs to it: a statement of its own reads both after the lock was got.
CREATE FUNCTION oncekey.hold(in_scope text, in_key text) RETURNS SETOF oncekey.whole
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key FOR UPDATE;
    RETURN QUERY SELECT whole.* FROM oncekey.whole AS whole WHERE whole.scope = in_scope AND whole.key = in_key;
END
$$;

-- The two of 0007 that read and write a record, which no older code calls: with all that belongs to it, and as it is now.
DROP FUNCTION oncekey.lock_request_2(bigint, integer, integer, text, text, bigint, integer, integer);

CREATE FUNCTION oncekey.lock_request_2(
    lock bigint, family integer, mark integer, in_scope text, in_key text, at bigint, lease_ms integer,
    deadline_ms integer,
    OUT locked boolean, OUT other boolean, OUT begun bigint, OUT now bigint, OUT seen oncekey.whole)
LANGUAGE plpgsql VOLATILE AS $$
-- The collation is said, because what convert_from returns has C's, and an index of the default one does not serve that.
DECLARE
    marked boolean;
    set_to text;
BEGIN
    IF current_setting('transaction_read_only') = 'on' THEN
        RAISE read_only_sql_transaction USING MESSAGE = 'this server only reads';
    END IF;
    set_to := set_config('idle_in_transaction_session_timeout', lease_ms::text, true);
    set_to := set_config('statement_timeout', lease_ms::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        set_to := set_config('synchronous_commit', 'on', true);
    END IF;
    -- A client that falls silent in the middle of a message is neither idle nor executing: only this ends it.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        set_to := set_config('transaction_timeout', deadline_ms::text, true);
    END IF;
    marked := pg_try_advisory_xact_lock_shared(family, mark);
    locked := pg_try_advisory_xact_lock(lock);
    IF locked THEN
        marked := pg_try_advisory_xact_lock(family, mark);
    END IF;
    other := false;
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    -- What is asked for most is a key without a record, or an answer: neither has anything beside it that counts.
    SELECT record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery, record.method,
           record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered, record.fence,
           record.version, record.owner, record.lease_until, record.deadline, record.call_timeout, record.ttl,
           record.attempts, record.recovery_point, record.response_status, record.response_headers,
           record.response_body, record.response_schema, record.last_error, record.created_at, record.last_run_at,
           record.finished_at, record.expires_at,
           NULL::text, NULL::text, NULL::bytea, NULL::bigint, 0
    INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope COLLATE "default"
      AND record.key = in_key COLLATE "default";
    IF seen.state <> 'completed' THEN
        SELECT whole.* INTO seen FROM oncekey.whole AS whole WHERE whole.scope = in_scope COLLATE "default"
      AND whole.key = in_key COLLATE "default";
    END IF;
    now := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF marked AND NOT locked AND (seen.scope IS NULL OR seen.expires_at <= now) THEN
        other := oncekey.lock_holder(lock, family, mark) = 'other';
        SELECT whole.* INTO seen FROM oncekey.whole AS whole WHERE whole.scope = in_scope COLLATE "default"
      AND whole.key = in_key COLLATE "default";
        now := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    END IF;
END
$$;

CREATE OR REPLACE PROCEDURE oncekey.seal(
    in_scope bytea, in_key bytea, in_incarnation bytea, in_operation bytea, in_effects bytea, in_recovery bytea,
    in_method bytea, in_path bytea, in_fingerprint bytea, in_seed bytea, in_outcome bytea, in_entered boolean,
    in_deadline bigint, in_call_timeout bigint, in_ttl bigint,
    in_status integer, in_headers bytea, in_body bytea, in_schema integer, at bigint,
    INOUT expires_at bigint, INOUT begun bigint)
LANGUAGE plpgsql AS $$
DECLARE
    instant bigint := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    set_to text;
BEGIN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        set_to := set_config('synchronous_commit', 'on', true);
    END IF;
    INSERT INTO oncekey.record (
        scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
        state, outcome, entered, fence, version, deadline, call_timeout, ttl, attempts, recovery_point,
        response_status, response_headers, response_body, response_schema,
        created_at, last_run_at, finished_at, expires_at, memo_version)
    VALUES (
        convert_from(in_scope, 'UTF8'), convert_from(in_key, 'UTF8'), encode(in_incarnation, 'hex')::uuid,
        convert_from(in_operation, 'UTF8'), convert_from(in_effects, 'UTF8'), convert_from(in_recovery, 'UTF8'),
        convert_from(in_method, 'UTF8'), convert_from(in_path, 'UTF8'), convert_from(in_fingerprint, 'UTF8'), in_seed,
        'completed', convert_from(in_outcome, 'UTF8'), in_entered, 1, 1, instant + in_deadline, in_call_timeout, in_ttl,
        1, 'finished', in_status, convert_from(in_headers, 'UTF8'), in_body, in_schema,
        instant, instant, instant, instant + in_ttl, 0);
    expires_at := instant + in_ttl;
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    -- By the transaction's own number a client can ask what became of the COMMIT, if something after it fails.
    RAISE INFO USING ERRCODE = 'OK001', MESSAGE = format(
        '{"expires_at":%s,"begun":%s,"xact":%s}', expires_at, begun, pg_current_xact_id()::text);
END
$$;

-- What older code writes into its columns goes to `work`, too. What this version writes leaves them as they are, so they
-- tell who wrote. A record of another life, or one that had no row of its own yet, starts with nothing in them.
-- The older application's user has no rights on the new table, so these functions have those of whoever migrates.
CREATE FUNCTION oncekey.split_old() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.memo_version >= 0 AND
       (NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after, NEW.reconcile_tries) IS NOT DISTINCT FROM
       (OLD.memo, OLD.intent, OLD.request, OLD.reconcile_after, OLD.reconcile_tries)
    THEN
        NEW.memo := NULL;
        NEW.intent := NULL;
        NEW.request := NULL;
        NEW.reconcile_after := NULL;
        NEW.reconcile_tries := 0;
        RETURN NEW;
    END IF;
    NEW.memo_version := CASE WHEN NEW.memo IS NULL AND NEW.intent IS NULL THEN 0 ELSE NEW.version END;
    IF TG_OP = 'UPDATE' THEN
        DELETE FROM oncekey.work AS work WHERE work.incarnation IN (OLD.incarnation, NEW.incarnation);
    END IF;
    IF num_nonnulls(NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after) > 0 OR NEW.reconcile_tries > 0 THEN
        INSERT INTO oncekey.work (
            incarnation, scope, key, memo_version, memo, intent, request, reconcile_after, reconcile_tries)
        VALUES (NEW.incarnation, NEW.scope, NEW.key, NEW.memo_version, NEW.memo, NEW.intent, NEW.request,
                NEW.reconcile_after, NEW.reconcile_tries);
    END IF;
    RETURN NEW;
END
$$;

-- Not before an insert: one that finds the key taken must leave no trace.
CREATE TRIGGER split_inserted AFTER INSERT ON oncekey.record FOR EACH ROW
WHEN (pg_trigger_depth() = 0 AND NEW.memo_version < 0 AND NEW.request IS NOT NULL)
EXECUTE FUNCTION oncekey.split_old();

CREATE TRIGGER split_updated BEFORE UPDATE ON oncekey.record FOR EACH ROW
WHEN (pg_trigger_depth() = 0
      AND (NEW.memo_version < 0 OR OLD.memo_version < 0 OR NEW.incarnation <> OLD.incarnation
           OR (NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after, NEW.reconcile_tries) IS DISTINCT FROM
              (OLD.memo, OLD.intent, OLD.request, OLD.reconcile_after, OLD.reconcile_tries)))
EXECUTE FUNCTION oncekey.split_old();

CREATE FUNCTION oncekey.split_removed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    DELETE FROM oncekey.work AS work WHERE work.incarnation = OLD.incarnation;
    RETURN NULL;
END
$$;

CREATE TRIGGER split_removed AFTER DELETE ON oncekey.record FOR EACH ROW EXECUTE FUNCTION oncekey.split_removed();

-- What this version writes to `work` goes to the columns that older code reads.
CREATE FUNCTION oncekey.split_new() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        UPDATE oncekey.record AS record
        SET memo = NULL, intent = NULL, request = NULL, reconcile_after = NULL, reconcile_tries = 0
        WHERE record.scope = OLD.scope AND record.key = OLD.key AND record.incarnation = OLD.incarnation;
    ELSE
        UPDATE oncekey.record AS record
        SET memo = NEW.memo, intent = NEW.intent, request = NEW.request, reconcile_after = NEW.reconcile_after,
            reconcile_tries = NEW.reconcile_tries
        WHERE record.scope = NEW.scope AND record.key = NEW.key AND record.incarnation = NEW.incarnation;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER split_written AFTER INSERT OR UPDATE OR DELETE ON oncekey.work FOR EACH ROW
WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION oncekey.split_new();

-- What is unfinished gets its row now, finished records by 0009. Served by record_key.
UPDATE oncekey.record AS record SET memo_version = -1
WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
  AND (num_nonnulls(record.memo, record.intent, record.request, record.reconcile_after) > 0 OR record.reconcile_tries > 0);
