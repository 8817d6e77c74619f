-- What sweepers and reapers say. Pages carry the clock even if they are empty, and no answers: bodies may be large.
-- Writes prove the version that was read (V), so nothing is moved that somebody else moved first.

-- name: stale
SELECT clock.now, page.*
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock LEFT JOIN (
    SELECT record.*
    FROM oncekey_record AS record
    WHERE record.state = 'in_progress'
      AND (record.created_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
      AND record.lease_until <= COALESCE(:now, (SELECT now FROM oncekey_clock))
    ORDER BY record.created_at, record.scope, record.key
    LIMIT :limit) AS page
ORDER BY page.created_at, page.scope, page.key;

-- name: runs
SELECT record.operation, record.finished_at - record.last_run_at AS took
FROM oncekey_record AS record
WHERE record.state IN ('completed', 'failed_retryable', 'pending') AND record.finished_at > record.last_run_at
ORDER BY record.expires_at DESC, record.scope DESC, record.key DESC
LIMIT :limit;

-- name: sweep_retryable
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'in_progress' AND lease_until <= COALESCE(:now, (SELECT now FROM oncekey_clock)) AND {runs_again}
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: expire_begun
{doubted}
  AND state = 'failed_retryable' AND expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) AND (memo IS NOT NULL OR intent IS NOT NULL)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: expiring
SELECT clock.now, page.*
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point,
        CASE WHEN record.state = 'failed_retryable' THEN record.memo END AS memo, record.intent,
        NULL AS response_status, NULL AS response_headers, NULL AS response_body, NULL AS response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL AS request
    FROM oncekey_record AS record
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      AND record.expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
      AND (record.expires_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit) AS page
ORDER BY page.expires_at, page.scope, page.key;

-- name: kept_expired
SELECT clock.now, page.*
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point,
        CASE WHEN record.state = 'failed_retryable' THEN record.memo END AS memo, record.intent,
        NULL AS response_status, NULL AS response_headers, NULL AS response_body, NULL AS response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL AS request
    FROM oncekey_record AS record
    WHERE record.state = 'expired'
      AND record.expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
      AND (record.expires_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit) AS page
ORDER BY page.expires_at, page.scope, page.key;

-- name: purge_expired
-- The ordinary case of the reaper, and `purge_kept` and `mark_expired` like it. `until` comes from an instant that the reaper
-- has compared with its own clocks; the state is the one before the move.
DELETE FROM oncekey_record
WHERE rowid IN (
    SELECT record.rowid
    FROM oncekey_record AS record
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      AND ((record.state = 'completed' AND NOT :soft)
           OR (record.state = 'failed_retryable' AND record.memo IS NULL AND record.intent IS NULL))
      AND record.expires_at <= min(:until, COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
      AND (record.expires_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
      AND (:trusted_for IS NULL OR record.ttl <= :trusted_for)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, scope, key, incarnation, operation, fence, expires_at,
          state;

-- name: purge_kept
DELETE FROM oncekey_record
WHERE rowid IN (
    SELECT record.rowid
    FROM oncekey_record AS record
    WHERE record.state = 'expired'
      AND record.expires_at <= min(:until, COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
      AND (record.expires_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
      AND (:trusted_for IS NULL OR record.ttl <= :trusted_for)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, scope, key, incarnation, operation, fence, expires_at,
          state;

-- name: mark_expired
UPDATE oncekey_record
SET state = 'expired', version = version + 1
WHERE rowid IN (
    SELECT record.rowid
    FROM oncekey_record AS record
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      AND record.state = 'completed'
      AND record.expires_at <= min(:until, COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
      AND (record.expires_at, record.scope, record.key) > (:after_at, :after_scope, :after_key)
      AND (:trusted_for IS NULL OR record.ttl <= :trusted_for)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, scope, key, incarnation, operation, fence, expires_at,
          'completed' AS state;

-- name: drop_unclaimed
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer' AND fence = 0 AND state = 'ready'
RETURNING id;

-- name: abandon
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, version = version + 1, owner = NULL, lease_until = NULL,
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, recovery_point = 'finished', request = NULL,
    finished_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    expires_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :kept
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'pending' AND expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: live_keys
SELECT count(*) AS live
FROM (
    SELECT 1 FROM oncekey_record AS record
    WHERE record.scope = :scope
      AND record.state <> 'expired'
      AND (record.state IN ('pending', 'in_progress', 'unknown')
           OR record.expires_at > COALESCE(:now, (SELECT now FROM oncekey_clock)))
    LIMIT :limit) AS counted;

-- name: note
INSERT INTO oncekey_audit (
    at, scope, key_digest, incarnation, operation, fence, source, target, trigger, actor, who, why)
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)),
       json_extract(line.value, '$.scope'), json_extract(line.value, '$.key_digest'),
       json_extract(line.value, '$.incarnation'), json_extract(line.value, '$.operation'),
       json_extract(line.value, '$.fence'), json_extract(line.value, '$.source'),
       json_extract(line.value, '$.target'), json_extract(line.value, '$.trigger'),
       json_extract(line.value, '$.actor'), json_extract(line.value, '$.who'), json_extract(line.value, '$.why')
FROM json_each(:notes) AS line;

-- name: history
SELECT line.*
FROM oncekey_audit AS line
WHERE line.scope = :scope AND line.key_digest = :key_digest AND line.id > :after
ORDER BY line.id
LIMIT :limit;

-- name: forget_notes
DELETE FROM oncekey_audit
WHERE id IN (
    SELECT oldest.id
    FROM (SELECT first.id, first.at FROM oncekey_audit AS first ORDER BY first.id LIMIT :limit) AS oldest
    WHERE oldest.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
RETURNING id;

-- name: beat
INSERT INTO oncekey_worker (name, tasks, started_at, seen_at, every, calls)
SELECT :name, :tasks, clock.now, clock.now, :every, :calls
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock
WHERE true
ON CONFLICT (name) DO UPDATE SET tasks = excluded.tasks, seen_at = excluded.seen_at, every = excluded.every,
    calls = excluded.calls
RETURNING seen_at;

-- name: leave
DELETE FROM oncekey_worker WHERE name = :name
RETURNING name;

-- name: workers
SELECT clock.now, worker.name, worker.tasks, worker.started_at, worker.seen_at, worker.every, worker.calls
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock LEFT JOIN oncekey_worker AS worker
ORDER BY worker.started_at, worker.name;

-- name: forget_workers
DELETE FROM oncekey_worker
WHERE seen_at + every <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
RETURNING name;
