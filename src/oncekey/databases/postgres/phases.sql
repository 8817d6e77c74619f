-- Steps of phased records: the owner's writes between its claim and its settlement. All are served by record_pkey.
-- The memo is compared as a whole: a resolver may have added the open call's result without raising the fence.
-- `keep` is `checkpoint` for the message of a COMMIT (migration 0011).

-- name: checkpoint
-- Store the results of the steps that the owner has finished (row 5).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1, recovery_point = :recovery_point,
    lease_until = GREATEST(record.lease_until, LEAST(clock.now + :lease::bigint, record.deadline)),
    memo_version = CASE WHEN :memo::text IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state = 'in_progress' AND work.intent IS NULL AND work.memo IS NOT DISTINCT FROM :seen_memo::text
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, NULL::text AS intent, work.request, work.reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: keep
-- Store the results of finished steps, in one message with COMMIT (row 5).
SELECT oncekey.keep(:given, :now)
WHERE {begun_here};

-- name: was_kept
-- Check whether `keep` was committed, after its reply was lost.
SELECT oncekey.was_kept(:given::bytea) AS committed;

-- name: announce
-- Record that the owner is about to make an external call, with its downstream key (row 5).
-- The call can be looked up from the moment it is announced.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1, recovery_point = :recovery_point,
    lease_until = GREATEST(record.lease_until, clock.now + :busy::bigint),
    memo_version = record.version + 1
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state = 'in_progress' AND work.memo IS NOT DISTINCT FROM :seen_memo::text
  AND CASE WHEN work.intent IS NULL THEN :sends::integer = 1
           ELSE work.intent::json ->> 'phase' = :phase::text
                AND work.intent::json ->> 'digest' = :digest::text
                AND (work.intent::json ->> 'sends')::integer = :sends::integer - 1
                AND (work.intent::json ->> 'repeatable_until')::bigint > clock.now END
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo,
    json_build_object(
        'phase', :phase::text, 'downstream_key', :downstream_key::text, 'digest', :digest::text,
        'sends', :sends::integer,
        'first_sent_at', COALESCE((work.intent::json ->> 'first_sent_at')::bigint, clock.now),
        'send_by', clock.now + :send_window::bigint,
        'repeatable_until',
        COALESCE((work.intent::json ->> 'first_sent_at')::bigint, clock.now) + :repeatable::bigint)::text AS intent,
    work.request, work.reconcile_after, COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}, called AS (
    INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
    SELECT written.incarnation, :phase::text, :downstream_key::text, written.scope, written.key, written.operation,
           written.now
    FROM written
    ON CONFLICT DO NOTHING
)
SELECT written.* FROM written;

-- name: result
-- Store the result of the owner's external call (row 6).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'in_progress', version = record.version + 1, recovery_point = :recovery_point, owner = :owner,
    lease_until = LEAST(clock.now + :lease::bigint, GREATEST(record.deadline, clock.now)), last_error = NULL,
    memo_version = CASE WHEN :memo::text IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state IN ('in_progress', 'unknown', 'failed_retryable') AND record.effects = 'phased'
  AND work.memo IS NOT DISTINCT FROM :seen_memo::text
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, NULL::text AS intent, work.request, NULL::bigint AS reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: withdraw
-- Remove the announcement of a call that was not sent (row 33).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1,
    memo_version = CASE WHEN work.memo IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state = 'in_progress' AND record.effects = 'phased' AND (work.intent::json ->> 'sends')::integer = 1
RETURNING clock.now, {hot}, record.memo_version,
    work.memo, NULL::text AS intent, work.request, work.reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: resumable
-- List the PHASED records that the completer may resume, oldest first.
-- Served by record_resumable. The cursor continues from the last row that was read, so that a page of rows that no
-- worker can resume does not hide the others.
WITH {clock}
SELECT clock.now, record.*
FROM clock, oncekey.whole AS record
WHERE record.effects = 'phased' AND record.state IN ('in_progress', 'failed_retryable')
  AND (record.created_at, record.scope, record.key) > (:after_created::bigint, :after_scope, :after_key)
  AND record.request IS NOT NULL
  AND CASE record.state WHEN 'in_progress' THEN record.lease_until <= clock.now
           ELSE (record.memo IS NOT NULL OR record.intent IS NOT NULL)
                AND COALESCE(record.reconcile_after, 0) <= clock.now END
ORDER BY record.created_at, record.scope, record.key
LIMIT :limit::integer;
