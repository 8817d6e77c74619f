-- part: due
SELECT {now} AS now, record.scope, record.`key`, record.incarnation, record.operation, record.fence, record.expires_at,
       record.state
FROM oncekey_record AS record

-- part: due_page
AND record.expires_at <= LEAST(:until, {now} - :age)
  AND record.expires_at >= :after_at
  AND (record.expires_at, record.scope, record.`key`) > (:after_at, :after_scope, :after_key)
  AND (:trusted_for IS NULL OR record.ttl <= :trusted_for)
ORDER BY record.expires_at, record.scope, record.`key`
LIMIT :limit
FOR UPDATE SKIP LOCKED

-- part: found
JSON_TABLE(:found, '$[*]' COLUMNS (
    scope VARCHAR(2000) CHARACTER SET utf8mb4 PATH '$.scope', name VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.key')) AS found
STRAIGHT_JOIN oncekey_record AS record ON record.scope = CAST(found.scope AS BINARY) AND record.`key` = CAST(found.name AS BINARY)

-- name: purge_expired
-- Delete a batch of records whose ttl is over (row 30).
-- The ordinary case of the reaper, like `purge_kept` and `mark_expired`: find and lock a batch, then move it.
-- A row that another transaction has locked is skipped. `until` comes from an instant that the reaper has compared with
-- its own clocks; the state is the one before the move.
{due}
WHERE record.state IN ('completed', 'failed_retryable', 'pending')
  AND ((record.state = 'completed' AND NOT :soft)
       OR (record.state = 'failed_retryable' AND record.memo IS NULL AND record.intent IS NULL))
  {due_page};

-- name: purge_expired_found
-- Delete the records that `purge_expired` found (row 30).
DELETE record FROM {found};

-- name: purge_kept
-- Delete a batch of records that are marked as expired (row 30).
{due}
WHERE record.state = 'expired'
  {due_page};

-- name: purge_kept_found
-- Delete the records that `purge_kept` found (row 30).
DELETE record FROM {found};

-- name: mark_expired
-- Mark a batch of completed records as expired (row 29).
{due}
WHERE record.state = 'completed'
  {due_page};

-- name: mark_expired_found
-- Mark the records that `mark_expired` found as expired (row 29).
UPDATE {found}
SET record.state = 'expired', record.version = record.version + 1;

-- name: drop_unclaimed
-- Delete the parcel of a deferred request, if no worker ever claimed it.
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer' AND fence = 0 AND state = 'ready';
SELECT ROW_COUNT() AS dropped FROM DUAL WHERE ROW_COUNT() > 0;

-- name: note
-- Insert lines into the audit.
INSERT INTO oncekey_audit (
    at, scope, key_digest, incarnation, operation, fence, source, target, `trigger`, actor, who, why)
SELECT {now}, line.scope, line.key_digest, line.incarnation, line.operation, line.fence, line.source, line.target, line.moved_by,
       line.actor, line.who, line.why
FROM JSON_TABLE(:notes, '$[*]' COLUMNS (
    scope VARCHAR(2000) CHARACTER SET utf8mb4 PATH '$.scope', key_digest VARCHAR(128) PATH '$.key_digest',
    incarnation VARCHAR(36) PATH '$.incarnation', operation VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.operation',
    fence BIGINT PATH '$.fence', source VARCHAR(16) PATH '$.source', target VARCHAR(16) PATH '$.target',
    moved_by VARCHAR(64) PATH '$.trigger', actor VARCHAR(64) PATH '$.actor',
    who TEXT CHARACTER SET utf8mb4 PATH '$.who', why TEXT CHARACTER SET utf8mb4 PATH '$.why')) AS line;

-- name: forget_notes
-- Delete a batch of old audit lines.
SELECT line.id FROM oncekey_audit AS line WHERE line.at <= {now} - :age ORDER BY line.id LIMIT :limit FOR UPDATE;
DELETE FROM oncekey_audit WHERE at <= {now} - :age ORDER BY id LIMIT :limit;

-- name: beat
-- Store a worker's heartbeat, and which tasks it runs.
INSERT INTO oncekey_worker (name, tasks, started_at, seen_at, every, calls)
VALUES (:name, :tasks, {now}, {now}, :every, :calls)
ON DUPLICATE KEY UPDATE tasks = :tasks, seen_at = {now}, every = :every, calls = :calls;
SELECT worker.seen_at FROM oncekey_worker AS worker WHERE worker.name = :name;

-- name: leave
-- Delete the row of a worker that stops.
DELETE FROM oncekey_worker WHERE name = :name
{written(name)};

-- name: forget_workers
-- Delete the rows of workers whose heartbeats ended long ago.
-- It also deletes the lock rows of LOCAL requests whose handlers committed by themselves.
DELETE FROM oncekey_lock WHERE number IN (
    SELECT free.number FROM (SELECT held.number FROM oncekey_lock AS held LIMIT 1000 FOR UPDATE SKIP LOCKED) AS free);
SELECT worker.name FROM oncekey_worker AS worker WHERE worker.seen_at + worker.every <= {now} - :age FOR UPDATE;
DELETE FROM oncekey_worker WHERE seen_at + every <= {now} - :age;
