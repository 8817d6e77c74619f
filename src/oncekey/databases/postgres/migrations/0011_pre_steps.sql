-- Stands alone: it builds on no post before it.
-- Stores a finished phase in the message of its COMMIT, as 0007 does for a completed record.

CREATE TYPE oncekey.kept AS (
    scope text, key text, incarnation uuid, fence bigint, recovery_point text, lease bigint, seen_memo text, memo text);

-- `checkpoint` (phases.sql) with all parameters in one value. It raises an error if the caller is no longer the owner
-- of the record, so that the server does not execute the COMMIT in the same message.
CREATE FUNCTION oncekey.keep(given bytea, at bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    it oncekey.kept := convert_from(given, 'UTF8')::oncekey.kept;
    instant bigint := COALESCE(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    set_to text;
BEGIN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        set_to := set_config('synchronous_commit', 'on', true);
    END IF;
    WITH written AS (
        UPDATE oncekey.record AS record
        SET version = record.version + 1, recovery_point = it.recovery_point,
            lease_until = GREATEST(record.lease_until, LEAST(instant + it.lease, record.deadline)),
            memo_version = record.version + 1
        FROM (SELECT) AS one LEFT JOIN oncekey.work AS work ON work.incarnation = it.incarnation
        WHERE record.scope = it.scope AND record.key = it.key
          AND record.incarnation = it.incarnation AND record.fence = it.fence
          AND GREATEST(record.memo_version, 0) = COALESCE(work.memo_version, 0)
          AND record.state = 'in_progress' AND work.intent IS NULL AND work.memo IS NOT DISTINCT FROM it.seen_memo
        RETURNING record.incarnation, record.scope, record.key, record.memo_version, work.request, work.reconcile_after,
            COALESCE(work.reconcile_tries, 0) AS reconcile_tries
    )
    INSERT INTO oncekey.work AS work (
        incarnation, scope, key, memo_version, memo, request, reconcile_after, reconcile_tries)
    SELECT written.incarnation, written.scope, written.key, written.memo_version, it.memo, written.request,
           written.reconcile_after, written.reconcile_tries
    FROM written
    ON CONFLICT (incarnation) DO UPDATE SET memo_version = excluded.memo_version, memo = excluded.memo;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'OK002', MESSAGE = 'the record is not its owner''s any more';
    END IF;
END
$$;

-- Returns whether `keep` was committed. It is called after an error that may come from a statement after the COMMIT.
CREATE FUNCTION oncekey.was_kept(given bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    it oncekey.kept := convert_from(given, 'UTF8')::oncekey.kept;
BEGIN
    PERFORM FROM oncekey.record AS record
    JOIN oncekey.work AS work ON work.incarnation = record.incarnation
    WHERE record.scope = it.scope AND record.key = it.key
      AND record.incarnation = it.incarnation AND record.fence = it.fence AND work.memo = it.memo;
    RETURN FOUND;
END
$$;
