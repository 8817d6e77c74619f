-- What travels in the message of a BEGIN or of a COMMIT, so that a new key of a LOCAL handler costs three messages.
-- Inside these functions the server keeps every plan for as long as the session lasts, whoever prepares nothing outside.
-- A client that can only send text hears how many rows there are, and nothing of what is in them. What it has to know beside
-- that is told: INFO is sent whatever client_min_messages says. What is told are instants, numbers and booleans, never a key
-- and never an answer, because a server's log may be set to keep them.

-- A record that is written without it says that nothing was tried.
ALTER TABLE oncekey.record ALTER COLUMN reconcile_tries SET DEFAULT 0;

-- A record with all that belongs to it. The record's own columns have it, until 0009 puts some of them aside.
CREATE VIEW oncekey.whole AS
SELECT record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery, record.method,
       record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered, record.fence,
       record.version, record.owner, record.lease_until, record.deadline, record.call_timeout, record.ttl, record.attempts,
       record.recovery_point, record.response_status, record.response_headers, record.response_body,
       record.response_schema, record.last_error, record.created_at, record.last_run_at, record.finished_at,
       record.expires_at,
       record.memo, record.intent, record.request, record.reconcile_after, record.reconcile_tries
FROM oncekey.record AS record;

-- `lock_request`, with the clock, and without the cost of what is as it should be already. A server that only reads refuses
-- the request here (25006), so that no handler runs where its answer has no place.
-- `oncekey.begun` is a setting of this transaction only, so a handler that commits by itself cannot keep it (L5).
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
    set_to := set_config('oncekey.begun', lock::text, true);
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
    begun := lock;
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

-- The same for a BEGIN that is sent as text. Nearly every request is a new key, so that is looked for first, without reading a
-- record or making a row; then the answer is true, and nothing is told: each notice is a packet of its own, which both sides
-- are woken for. A lock that somebody else has is told. Where a record is found nothing is told either, and the lock is asked
-- for once more in the ordinary way, by which a stored answer travels as what it is.
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

-- What a finished record says, as one value: the server reads a row in less time than two dozen arguments.
CREATE TYPE oncekey.sealed AS (
    scope text, key text, incarnation uuid, operation text, effects text, recovery text, method text, path text,
    fingerprint text, seed bytea, outcome text, entered boolean, deadline bigint, call_timeout bigint, ttl bigint,
    response_status integer, response_headers text, response_schema integer);

-- The finished record of a new key, for the message of its COMMIT: it fails where the key is taken, because what comes after
-- it in the message must not happen then. The instants are the server's own, of this moment and not of BEGIN. The client has
-- guessed the second at which the record expires; it is told what it guessed wrong, or if the transaction does not know its
-- lock any more, and nothing else.
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

-- Whether that record is there, for who sent it and heard an error that may be about what came after the COMMIT.
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
