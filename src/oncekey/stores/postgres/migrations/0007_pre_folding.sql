-- What travels in the message of a BEGIN or of a COMMIT, so that a new key of a LOCAL handler costs three messages.
-- Inside these functions the server keeps every plan for as long as the session lasts, whoever prepares nothing outside.
-- A client that can only send text has its rows told: INFO is sent whatever client_min_messages says. What is told are
-- instants and booleans, never a key and never an answer, because a server's log may be set to keep them.

-- `lock_request`, with the clock, and without the cost of what is as it should be already. A server that only reads refuses
-- the request here (25006), so that no handler runs where its answer has no place.
CREATE FUNCTION oncekey.lock_request_2(
    lock bigint, family integer, mark integer, in_scope text, in_key text, at bigint, lease_ms integer,
    deadline_ms integer,
    OUT locked boolean, OUT other boolean, OUT begun bigint, OUT now bigint, OUT seen oncekey.record)
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
    SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope COLLATE "default"
      AND record.key = in_key COLLATE "default";
    now := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF marked AND NOT locked AND (seen.scope IS NULL OR seen.expires_at <= now) THEN
        other := oncekey.lock_holder(lock, family, mark) = 'other';
        SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope COLLATE "default"
      AND record.key = in_key COLLATE "default";
        now := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    END IF;
END
$$;

-- The same for a BEGIN that is sent as text: it tells what it found, unless it found a record. Then it says nothing, and
-- is asked again in the ordinary way, by which a stored answer travels as what it is.
CREATE PROCEDURE oncekey.enter(
    lock bigint, family integer, mark integer, in_scope bytea, in_key bytea, at bigint, lease_ms integer,
    deadline_ms integer)
LANGUAGE plpgsql AS $$
DECLARE
    look record;
BEGIN
    look := oncekey.lock_request_2(
        lock, family, mark, convert_from(in_scope, 'UTF8'), convert_from(in_key, 'UTF8'), at, lease_ms, deadline_ms);
    IF (look.seen).scope IS NULL THEN
        RAISE INFO USING ERRCODE = 'OK001', MESSAGE = format(
            '{"scope":null,"locked":%s,"other":%s,"begun":%s,"now":%s}',
            look.locked::text, look.other::text, look.begun, look.now);
    END IF;
END
$$;

-- The finished record of a new key, for the message of its COMMIT: it fails where the key is taken, because what comes after
-- it in the message must not happen then. The instants are the server's own, of this moment and not of BEGIN.
CREATE PROCEDURE oncekey.seal(
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
        reconcile_tries, created_at, last_run_at, finished_at, expires_at)
    VALUES (
        convert_from(in_scope, 'UTF8'), convert_from(in_key, 'UTF8'), encode(in_incarnation, 'hex')::uuid,
        convert_from(in_operation, 'UTF8'), convert_from(in_effects, 'UTF8'), convert_from(in_recovery, 'UTF8'),
        convert_from(in_method, 'UTF8'), convert_from(in_path, 'UTF8'), convert_from(in_fingerprint, 'UTF8'), in_seed,
        'completed', convert_from(in_outcome, 'UTF8'), in_entered, 1, 1, instant + in_deadline, in_call_timeout, in_ttl,
        1, 'finished', in_status, convert_from(in_headers, 'UTF8'), in_body, in_schema,
        0, instant, instant, instant, instant + in_ttl);
    expires_at := instant + in_ttl;
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    -- By the transaction's own number a client can ask what became of the COMMIT, if something after it fails.
    RAISE INFO USING ERRCODE = 'OK001', MESSAGE = format(
        '{"expires_at":%s,"begun":%s,"xact":%s}', expires_at, begun, pg_current_xact_id()::text);
END
$$;
