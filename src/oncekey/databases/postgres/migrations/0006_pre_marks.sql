-- Shows which request holds the lock of a key: by a second lock, the mark, which excludes no other request.

-- Reads all advisory locks at one moment. Returns `other` only if the connection that holds the key also holds the mark
-- of another request; a holder without a mark (an older version, or a transaction that is ending) proves nothing.
CREATE FUNCTION oncekey.lock_holder(lock bigint, family integer, mark integer) RETURNS text
LANGUAGE sql VOLATILE AS $$
    WITH held AS MATERIALIZED (
        SELECT pid, classid, objid, objsubid FROM pg_catalog.pg_locks
        WHERE locktype = 'advisory' AND granted
          AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
    )
    SELECT CASE WHEN count(*) = 0 THEN 'nobody'
                WHEN count(marked.pid) > 0 AND NOT bool_or(marked.objid = $3::oid) THEN 'other'
                ELSE 'somebody' END
    FROM held AS keyed
    LEFT JOIN held AS marked ON marked.pid = keyed.pid AND marked.objsubid = 2 AND marked.classid = $2::oid
    WHERE keyed.objsubid = 1 AND (keyed.classid::bigint << 32 | keyed.objid::bigint) = $1
$$;

-- `lock_key` with the mark. A request takes its mark before it tries the lock, so that the lock is never visible without the
-- mark of its holder. A request that fails to get the lock, and finds no record or an expired one, calls `lock_holder` and
-- reads the record again, to see everything that was committed before that call. Marks are shared locks, and the holder of
-- the key makes its mark exclusive: a retry of the same request detects that without reading all locks of the server.
CREATE FUNCTION oncekey.lock_request(
    lock bigint, family integer, mark integer, in_scope text, in_key text, at bigint, lease_ms integer,
    deadline_ms integer,
    OUT locked boolean, OUT other boolean, OUT begun bigint, OUT seen oncekey.record)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    marked boolean;
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true),
            set_config('idle_in_transaction_session_timeout', lease_ms::text, true),
            set_config('statement_timeout', lease_ms::text, true);
    -- If a client stops within a message, its session is neither idle nor executing: only this time-out ends it.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        PERFORM set_config('transaction_timeout', deadline_ms::text, true);
    END IF;
    marked := pg_try_advisory_xact_lock_shared(family, mark);
    locked := pg_try_advisory_xact_lock(lock);
    IF locked THEN
        PERFORM pg_try_advisory_xact_lock(family, mark);
    END IF;
    other := false;
    begun := (extract(epoch FROM now()) * 1000000)::bigint;
    SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key;
    IF marked AND NOT locked AND (
        seen.scope IS NULL
        OR seen.expires_at <= COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint))
    THEN
        other := oncekey.lock_holder(lock, family, mark) = 'other';
        SELECT record.* INTO seen FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key;
    END IF;
END
$$;
