-- Functions that are called in one message with BEGIN or COMMIT, so that a new key of a LOCAL handler costs three
-- messages. The server caches the plans inside these functions until the session ends, even if the client prepares no
-- statements. A client that sends text receives the number of rows, but not their content. A function sends other
-- values in a notice of level INFO, which reaches the client whatever client_min_messages is. A notice contains
-- instants, numbers and booleans, never a key or a response, because the server may be configured to log notices.

-- An INSERT may omit the column: 0 means that no resolver has checked the record.
ALTER TABLE oncekey.record ALTER COLUMN reconcile_tries SET DEFAULT 0;

-- The complete record. All of its columns are in `record`, until 0009 drops those that 0008 copies to `work`.
CREATE VIEW oncekey.whole AS
SELECT record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery, record.method,
       record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered, record.fence,
       record.version, record.owner, record.lease_until, record.deadline, record.call_timeout, record.ttl, record.attempts,
       record.recovery_point, record.response_status, record.response_headers, record.response_body,
       record.response_schema, record.last_error, record.created_at, record.last_run_at, record.finished_at,
       record.expires_at,
       record.memo, record.intent, record.request, record.reconcile_after, record.reconcile_tries
FROM oncekey.record AS record;

-- `lock_request` that also returns the clock, and skips what need not be set or read. On a read-only server it raises
-- 25006, so that no handler runs whose response cannot be stored.
-- `oncekey.begun` is a setting of this transaction only: it is gone after a handler has committed by itself (L5).
CREATE FUNCTION oncekey.lock_request_2(
    lock bigint, family integer, mark integer, in_scope text, in_key text, at bigint, lease_ms integer,
    deadline_ms integer,
    OUT locked boolean, OUT other boolean, OUT begun bigint, OUT now bigint, OUT seen oncekey.whole)
LANGUAGE plpgsql VOLATILE AS $$
-- The queries name the collation: convert_from returns text with collation C, which an index with the default cannot serve.
DECLARE
    marked boolean;
    set_to text;
BEGIN
    IF current_setting('transaction_read_only') = 'on' THEN
        RAISE read_only_sql_transaction USING MESSAGE = 'this server only reads';
    END IF;
    set_to := set_config('idle_in_transaction_session_timeout', lease_ms::text, true);
    set_to := set_config('statement_timeout', lease_ms::text, true);
    set_to := set_config('oncekey.begun', lock::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        set_to := set_config('synchronous_commit', 'on', true);
    END IF;
    -- If a client stops within a message, its session is neither idle nor executing: only this time-out ends it.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        set_to := set_config('transaction_timeout', deadline_ms::text, true);
    END IF;
    marked := pg_try_advisory_xact_lock_shared(family, mark);
    locked := pg_try_advisory_xact_lock(lock);
    IF locked THEN
        marked := pg_try_advisory_xact_lock(family, mark);
    END IF;
    other := false;
    begun := lock;
    -- Most requests find no record or a completed one, and need none of the last five columns.
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

-- The same for a BEGIN that is sent as text. Nearly every request has a new key, so the function checks for that first,
-- without reading a record or building a row. It then returns true without a notice, because each notice is a separate
-- packet that wakes both sides. If another session holds the lock and there is no record, it sends a notice. If there
-- is a record, it sends none, and the client calls `lock_request_2`, which returns the stored response in a row.
CREATE FUNCTION oncekey.enter(
    lock bigint, family integer, mark integer, in_scope bytea, in_key bytea, at bigint, lease_ms integer,
    deadline_ms integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    look record;
    marked boolean;
    locked boolean := false;
BEGIN
    IF current_setting('transaction_read_only') = 'off'
       AND set_config('idle_in_transaction_session_timeout', lease_ms::text, true) IS NOT NULL
       AND set_config('statement_timeout', lease_ms::text, true) IS NOT NULL
       AND set_config('oncekey.begun', lock::text, true) IS NOT NULL
       AND (CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply') THEN true
                 ELSE set_config('synchronous_commit', 'on', true) IS NOT NULL END)
       AND (CASE WHEN current_setting('server_version_num')::integer < 170000 THEN true
                 ELSE set_config('transaction_timeout', deadline_ms::text, true) IS NOT NULL END)
    THEN
        marked := pg_try_advisory_xact_lock_shared(family, mark);
        locked := pg_try_advisory_xact_lock(lock);
    END IF;
    IF locked THEN
        marked := pg_try_advisory_xact_lock(family, mark);
        PERFORM FROM oncekey.record AS record WHERE record.scope = convert_from(in_scope, 'UTF8') COLLATE "default"
          AND record.key = convert_from(in_key, 'UTF8') COLLATE "default";
        RETURN NOT FOUND;
    END IF;
    look := oncekey.lock_request_2(
        lock, family, mark, convert_from(in_scope, 'UTF8'), convert_from(in_key, 'UTF8'), at, lease_ms, deadline_ms);
    IF (look.seen).scope IS NULL THEN
        RAISE INFO USING ERRCODE = 'OK001', MESSAGE = format(
            '{"scope":null,"locked":%s,"other":%s,"begun":%s,"now":%s}',
            look.locked::text, look.other::text, look.begun, look.now);
    END IF;
    RETURN false;
END
$$;

-- The columns of a completed record as one value, which the server parses faster than two dozen arguments.
CREATE TYPE oncekey.sealed AS (
    scope text, key text, incarnation uuid, operation text, effects text, recovery text, method text, path text,
    fingerprint text, seed bytea, outcome text, entered boolean, deadline bigint, call_timeout bigint, ttl bigint,
    response_status integer, response_headers text, response_schema integer);

-- Inserts the completed record of a new key, in one message with COMMIT. It raises an error if the key has a record, so
-- that the server does not execute the rest of the message. The instants are the server's current time, not that of
-- BEGIN. The client passes the second at which it expects the record to expire. The function sends a notice only if
-- that second is wrong, or if `oncekey.begun` is not set, because then this is not the transaction that took the lock.
CREATE FUNCTION oncekey.seal(given bytea, body bytea, at bigint, guess bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    it oncekey.sealed := convert_from(given, 'UTF8')::oncekey.sealed;
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
        created_at, last_run_at, finished_at, expires_at)
    VALUES (
        it.scope, it.key, it.incarnation, it.operation, it.effects, it.recovery, it.method, it.path, it.fingerprint,
        it.seed, 'completed', it.outcome, it.entered, 1, 1, instant + it.deadline, it.call_timeout, it.ttl, 1, 'finished',
        it.response_status, it.response_headers, body, it.response_schema,
        instant, instant, instant, instant + it.ttl);
    IF (instant + it.ttl) / 1000000 IS DISTINCT FROM guess OR COALESCE(current_setting('oncekey.begun', true), '') = '' THEN
        RAISE INFO USING ERRCODE = 'OK001', MESSAGE = '{"expires_at":' || instant + it.ttl || ',"begun":'
            || COALESCE(NULLIF(current_setting('oncekey.begun', true), ''), 'null') || '}';
    END IF;
END
$$;

-- Returns whether `seal` was committed. It is called after an error that may come from a statement after the COMMIT.
CREATE FUNCTION oncekey.was_sealed(given bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    it oncekey.sealed := convert_from(given, 'UTF8')::oncekey.sealed;
BEGIN
    PERFORM FROM oncekey.record AS record
    WHERE record.scope = it.scope AND record.key = it.key AND record.incarnation = it.incarnation;
    RETURN FOUND;
END
$$;
