-- Stands alone: it builds on no post before it.
-- Returns a stored response in the reply to the message of a BEGIN, so that a replay takes one message.

-- `enter` (0007) that sends a completed record in its notice. The server may log a notice, so the record is sent only
-- if `log_min_messages` excludes INFO. It is not sent either if the response is long, if it has characters that the
-- client's encoding could change, or if bytea_output is not hex. Without a notice the client calls `lock_request_2`.
CREATE FUNCTION oncekey.enter_2(
    lock bigint, family integer, mark integer, in_scope bytea, in_key bytea, at bigint, lease_ms integer,
    deadline_ms integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    look record;
    marked boolean;
    locked boolean := false;
    answer text;
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
        IF NOT FOUND THEN
            RETURN true;
        END IF;
        IF current_setting('log_min_messages') IN ('notice', 'warning', 'error', 'log', 'fatal', 'panic')
           AND current_setting('bytea_output') = 'hex' AND current_setting('server_encoding') = 'UTF8'
        THEN
            SELECT row_to_json(one) INTO answer FROM (
                SELECT * FROM oncekey.record AS record
                WHERE record.scope = convert_from(in_scope, 'UTF8') COLLATE "default"
                  AND record.key = convert_from(in_key, 'UTF8') COLLATE "default" LIMIT 1) AS one
            WHERE one.state = 'completed' AND COALESCE(octet_length(one.response_body), 0) <= 8192;
            IF octet_length(answer) = length(answer) THEN
                RAISE INFO USING ERRCODE = 'OK001', MESSAGE = format(
                    '{"locked":true,"other":false,"begun":%s,"now":%s,"record":%s}', lock,
                    COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), answer);
            END IF;
        END IF;
        RETURN false;
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
