-- Steps of phased records: the owner's writes between its claim and its settlement. All are served by the primary key.
-- The memo is compared as a whole: a resolver may have added the open call's result without raising the fence.

-- name: checkpoint
-- Store the results of the steps that the owner has finished (row 5).
UPDATE oncekey_record
SET version = version + 1, memo = :memo, recovery_point = :recovery_point,
    lease_until = {greatest}(lease_until, {least}({now} + :lease, deadline))
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND intent IS NULL AND memo {is} :seen_memo
{giving};

-- name: announce
-- Record that the owner is about to make an external call, with its downstream key (row 5).
UPDATE oncekey_record
SET version = version + 1, memo = :memo, recovery_point = :recovery_point,
    intent = json_object(
        'phase', :phase, 'downstream_key', :downstream_key, 'digest', :digest, 'sends', :sends,
        'first_sent_at', COALESCE({json_number(intent; first_sent_at)}, {now}),
        'send_by', {now} + :send_window,
        'repeatable_until',
        COALESCE({json_number(intent; first_sent_at)}, {now}) + :repeatable),
    lease_until = {greatest}(lease_until, {now} + :busy)
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo {is} :seen_memo
  AND CASE WHEN intent IS NULL THEN :sends = 1
           ELSE {json(intent; phase)} = :phase
                AND {json(intent; digest)} = :digest
                AND {json_number(intent; sends)} = :sends - 1
                AND {json_number(intent; repeatable_until)} > {now} END
{giving}
{announced};

-- name: result
-- Store the result of the owner's external call (row 6).
UPDATE oncekey_record
SET state = 'in_progress', version = version + 1, memo = :memo, recovery_point = :recovery_point, intent = NULL,
    owner = :owner,
    lease_until = {least}({now} + :lease, {greatest}(deadline, {now})),
    last_error = NULL, reconcile_after = NULL
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state IN ('in_progress', 'unknown', 'failed_retryable') AND effects = 'phased' AND memo {is} :seen_memo
{giving};

-- name: withdraw
-- Remove the announcement of a call that was not sent (row 33).
UPDATE oncekey_record
SET version = version + 1, intent = NULL
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'phased' AND {json_number(intent; sends)} = 1
{giving};

-- name: resumable
-- List the PHASED records that the completer may resume, oldest first.
-- Served by oncekey_record_resumable. The cursor continues from the last row that was read, so that a page of rows
-- that no worker can resume does not hide the others.
SELECT clock.now AS now, record.*
FROM {clock}, oncekey_record AS record
WHERE record.effects = 'phased' AND record.state IN ('in_progress', 'failed_retryable')
  AND (record.created_at, record.scope, record.`key`) > (:after_created, :after_scope, :after_key)
  AND record.request IS NOT NULL
  AND CASE record.state WHEN 'in_progress' THEN record.lease_until <= clock.now
           ELSE (record.memo IS NOT NULL OR record.intent IS NOT NULL)
                AND COALESCE(record.reconcile_after, 0) <= clock.now END
ORDER BY record.created_at, record.scope, record.`key`
LIMIT :limit;
