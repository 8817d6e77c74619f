-- name: purge_expired
-- Delete a batch of records whose ttl is over (row 30).
-- The ordinary case of the reaper, like `purge_kept` and `mark_expired`. `until` comes from an instant that the
-- reaper has compared with its own clocks; the state is the one before the move.
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
-- Delete a batch of records that are marked as expired (row 30).
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
-- Mark a batch of completed records as expired (row 29).
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
-- Delete the parcel of a deferred request, if no worker ever claimed it.
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer' AND fence = 0 AND state = 'ready'
RETURNING id;

-- name: note
-- Insert lines into the audit.
INSERT INTO oncekey_audit (
    at, scope, key_digest, incarnation, operation, fence, source, target, trigger, actor, who, why)
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)),
       json_extract(line.value, '$.scope'), json_extract(line.value, '$.key_digest'),
       json_extract(line.value, '$.incarnation'), json_extract(line.value, '$.operation'),
       json_extract(line.value, '$.fence'), json_extract(line.value, '$.source'),
       json_extract(line.value, '$.target'), json_extract(line.value, '$.trigger'),
       json_extract(line.value, '$.actor'), json_extract(line.value, '$.who'), json_extract(line.value, '$.why')
FROM json_each(:notes) AS line;

-- name: forget_notes
-- Delete a batch of old audit lines.
DELETE FROM oncekey_audit
WHERE id IN (
    SELECT oldest.id
    FROM (SELECT first.id, first.at FROM oncekey_audit AS first ORDER BY first.id LIMIT :limit) AS oldest
    WHERE oldest.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
RETURNING id;

-- name: beat
-- Store a worker's heartbeat, and which tasks it runs.
INSERT INTO oncekey_worker (name, tasks, started_at, seen_at, every, calls)
SELECT :name, :tasks, clock.now, clock.now, :every, :calls
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock
WHERE true
ON CONFLICT (name) DO UPDATE SET tasks = excluded.tasks, seen_at = excluded.seen_at, every = excluded.every,
    calls = excluded.calls
RETURNING seen_at;

-- name: leave
-- Delete the row of a worker that stops.
DELETE FROM oncekey_worker WHERE name = :name
RETURNING name;

-- name: forget_workers
-- Delete the rows of workers whose heartbeats ended long ago.
DELETE FROM oncekey_worker
WHERE seen_at + every <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
RETURNING name;
