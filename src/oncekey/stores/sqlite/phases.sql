-- Steps of phased records: what an owner writes between its claim and its settlement. All are served by the primary key.
-- The memo is compared whole: a resolver may have added the open call's result without a new fence.

-- name: checkpoint
UPDATE oncekey_record
SET version = version + 1, memo = :memo, recovery_point = :recovery_point,
    lease_until = max(lease_until, min(COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease, deadline))
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND intent IS NULL AND memo IS :seen_memo
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: announce
UPDATE oncekey_record
SET version = version + 1, memo = :memo, recovery_point = :recovery_point,
    intent = json_object(
        'phase', :phase, 'downstream_key', :downstream_key, 'digest', :digest, 'sends', :sends,
        'first_sent_at', COALESCE(json_extract(intent, '$.first_sent_at'), COALESCE(:now, (SELECT now FROM oncekey_clock))),
        'send_by', COALESCE(:now, (SELECT now FROM oncekey_clock)) + :send_window,
        'repeatable_until',
        COALESCE(json_extract(intent, '$.first_sent_at'), COALESCE(:now, (SELECT now FROM oncekey_clock))) + :repeatable),
    lease_until = max(lease_until, COALESCE(:now, (SELECT now FROM oncekey_clock)) + :busy)
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo IS :seen_memo
  AND CASE WHEN intent IS NULL THEN :sends = 1
           ELSE json_extract(intent, '$.phase') = :phase
                AND json_extract(intent, '$.digest') = :digest
                AND json_extract(intent, '$.sends') = :sends - 1
                AND json_extract(intent, '$.repeatable_until') > COALESCE(:now, (SELECT now FROM oncekey_clock)) END
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: result
UPDATE oncekey_record
SET state = 'in_progress', version = version + 1, memo = :memo, recovery_point = :recovery_point, intent = NULL,
    owner = :owner,
    lease_until = min(COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease, max(deadline, COALESCE(:now, (SELECT now FROM oncekey_clock)))),
    last_error = NULL, reconcile_after = NULL
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state IN ('in_progress', 'unknown', 'failed_retryable') AND effects = 'phased' AND memo IS :seen_memo
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: withdraw
UPDATE oncekey_record
SET version = version + 1, intent = NULL
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'phased' AND json_extract(intent, '$.sends') = 1
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: resumable
-- Served by oncekey_record_resumable. The cursor goes on from the last row that was looked at, so that a page of rows
-- that nobody can resume does not stand in the way of the others.
SELECT COALESCE(:now, clock.now) AS now, record.*
FROM oncekey_clock AS clock, oncekey_record AS record
WHERE record.effects = 'phased' AND record.state IN ('in_progress', 'failed_retryable')
  AND (record.created_at, record.scope, record.key) > (:after_created, :after_scope, :after_key)
  AND record.request IS NOT NULL
  AND CASE record.state WHEN 'in_progress' THEN record.lease_until <= COALESCE(:now, clock.now)
           ELSE (record.memo IS NOT NULL OR record.intent IS NOT NULL)
                AND COALESCE(record.reconcile_after, 0) <= COALESCE(:now, clock.now) END
ORDER BY record.created_at, record.scope, record.key
LIMIT :limit;
