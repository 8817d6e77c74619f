-- The statements of the sweeper and the reaper. Pages return the clock even if they are empty, and no responses: bodies
-- may be large. Writes prove the version that was read, so a record that another actor moved first is not changed.

-- name: stale
-- List the records in progress whose lease has expired, oldest first.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT record.*
    FROM oncekey.whole AS record
    WHERE record.state = 'in_progress'
      AND (record.created_at, record.scope, record.key) > (:after_at::bigint, :after_scope::text, :after_key::text)
      AND record.lease_until <= (SELECT clock.now FROM clock)
    ORDER BY record.created_at, record.scope, record.key
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.created_at, page.scope, page.key;

-- name: runs
-- Read how long the operations that finished last took.
SELECT record.operation, record.finished_at - record.last_run_at AS took
FROM oncekey.record AS record
WHERE record.state IN ('completed', 'failed_retryable', 'pending') AND record.finished_at > record.last_run_at
ORDER BY record.expires_at DESC, record.scope DESC, record.key DESC
LIMIT :limit::bigint;

-- name: sweep_retryable
-- Release a record whose lease has expired and that may run again (row 14).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'in_progress' AND record.lease_until <= clock.now AND {runs_again}
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.intent, seen.request, seen.reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: expire_begun
-- Mark an expired retryable record unknown if steps are finished or a call is open (row 18).
{doubted}
  AND record.state = 'failed_retryable' AND record.expires_at <= clock.now
  AND (seen.memo IS NOT NULL OR seen.intent IS NOT NULL)
{as_unknown};

-- part: without_answer
{all_but_content},
        CASE WHEN record.state = 'failed_retryable' THEN record.memo END AS memo, NULL AS response_status,
        NULL AS response_headers, NULL AS response_body, NULL AS response_schema, NULL AS request
    FROM oncekey.whole AS record;

-- part: page
AND record.expires_at <= (SELECT clock.now FROM clock) - :age::bigint
      AND (record.expires_at, record.scope, record.key) > (:after_at::bigint, :after_scope::text, :after_key::text)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.expires_at, page.scope, page.key;

-- name: expiring
-- List the records whose ttl is over and that are not marked as expired, the oldest expiry first.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        {without_answer}
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      {page};

-- name: kept_expired
-- List the records that are marked as expired, the oldest expiry first.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        {without_answer}
    WHERE record.state = 'expired'
      {page};

-- part: reaps
WITH clock AS MATERIALIZED (
    SELECT {now} AS now,
           set_config('synchronous_commit', 'off', true) AS lazy
), due AS MATERIALIZED (
    SELECT record.ctid AS spot, record.expires_at, record.scope, record.key
    FROM oncekey.record AS record;

-- part: due
AND record.expires_at <= LEAST(:until::bigint, (SELECT clock.now - :age::bigint FROM clock WHERE clock.lazy = 'off'))
      AND (record.expires_at, record.scope, record.key) > (:after_at::bigint, :after_scope::text, :after_key::text)
      AND (:trusted_for::bigint IS NULL OR record.ttl <= :trusted_for::bigint)
    ORDER BY record.expires_at, record.scope, record.key
    LIMIT :limit::bigint
    FOR UPDATE SKIP LOCKED;

-- part: moved
WHERE record.ctid = ANY (ARRAY(SELECT due.spot FROM due))
    RETURNING record.scope, record.key, record.incarnation, record.operation, record.fence, record.state, record.expires_at;

-- part: rfc3339(instant)
to_char(to_timestamp({instant} / 1000000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"');

-- part: noted(source; target)
-- One line for the records of a scope and a state, or for each of them. A line about one record names it.
INSERT INTO oncekey.audit (
        at, scope, key_digest, incarnation, operation, fence, source, target, trigger, actor, who, why)
    SELECT clock.now, batch.scope,
           CASE WHEN batch.keys = 1 THEN left(encode(sha256(convert_to(batch.key, 'UTF8')), 'hex'), 16) ELSE '' END,
           CASE WHEN batch.keys = 1 THEN batch.incarnation ELSE '00000000-0000-0000-0000-000000000000' END,
           CASE WHEN batch.keys = 1 THEN batch.operation ELSE '' END,
           CASE WHEN batch.keys = 1 THEN batch.fence ELSE 0 END,
           {source}, {target}, :trigger::text, :actor::text, :who::text,
           CASE WHEN batch.keys = 1 THEN :why::text
                ELSE format('%s: %s keys, expiry %s to %s', :why::text, batch.keys,
                            {rfc3339(batch.first)}, {rfc3339(batch.last)}) END
    FROM clock CROSS JOIN (
        SELECT moved.scope, moved.state, count(*) AS keys, min(moved.expires_at) AS first, max(moved.expires_at) AS last,
               (array_agg(moved.key))[1] AS key, (array_agg(moved.incarnation))[1] AS incarnation,
               (array_agg(moved.operation))[1] AS operation, min(moved.fence) AS fence
        FROM moved
        WHERE :noted::boolean
        GROUP BY moved.scope, moved.state, CASE WHEN :each::boolean THEN moved.key END) AS batch
)
SELECT clock.now, (SELECT count(*) FROM due) AS looked, (SELECT count(*) FROM moved) AS moved,
       last.expires_at, last.scope, last.key
FROM clock LEFT JOIN (
    SELECT due.expires_at, due.scope, due.key
    FROM due
    ORDER BY due.expires_at DESC, due.scope DESC, due.key DESC
    LIMIT 1) AS last ON true;

-- name: purge_expired
-- Delete a batch of records whose ttl is over (row 30).
-- The ordinary case of the reaper, like `purge_kept` and `mark_expired`: find, lock, move and note a batch at once.
-- A row that another transaction has locked is skipped, so that no statement waits for another. A row that was written
-- since the statement began is compared again when it is locked, and no longer matches, so a key that is in use again
-- stays. `until` comes from an instant that the reaper has compared with its own clocks. The commit does not wait for the
-- disk: if a crash of the server undoes a deletion, and its audit line with it, the reaper finds the record again.
{reaps}
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      AND ((record.state = 'completed' AND NOT :soft::boolean)
           OR (record.state = 'failed_retryable' AND record.memo_version <= 0))
      {due}
), moved AS (
    DELETE FROM oncekey.record AS record
    {moved}
), forgotten AS (
    DELETE FROM oncekey.work AS work USING moved WHERE work.incarnation = moved.incarnation
), noted AS (
    {noted(batch.state; NULL)};

-- name: purge_kept
-- Delete a batch of records that are marked as expired (row 30).
{reaps}
    WHERE record.state = 'expired'
      {due}
), moved AS (
    DELETE FROM oncekey.record AS record
    {moved}
), forgotten AS (
    DELETE FROM oncekey.work AS work USING moved WHERE work.incarnation = moved.incarnation
), noted AS (
    {noted(batch.state; NULL)};

-- name: mark_expired
-- Mark a batch of completed records as expired (row 29).
{reaps}
    WHERE record.state IN ('completed', 'failed_retryable', 'pending')
      AND record.state = 'completed'
      {due}
), moved AS (
    UPDATE oncekey.record AS record
    SET state = 'expired', version = version + 1
    {moved}
), noted AS (
    {noted('completed'; batch.state)};

-- name: drop_unclaimed
-- Delete the parcel of a deferred request, if no worker ever claimed it.
DELETE FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :seen_incarnation::uuid AND parcel.kind = 'defer'
  AND parcel.fence = 0 AND parcel.state = 'ready'
RETURNING parcel.id;

-- name: abandon
-- Complete an expired pending record, whose parcel no worker ever claimed (row 28).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = record.version + 1, owner = NULL, lease_until = NULL,
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, finished_at = clock.now, recovery_point = 'finished', expires_at = clock.now + :kept::bigint,
    memo_version = CASE WHEN seen.memo IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'pending' AND record.expires_at <= clock.now
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, NULL::text AS intent, NULL::bytea AS request, NULL::bigint AS reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: live_keys
-- Count the live keys of a scope, up to a limit.
SELECT count(*) AS live
FROM (
    SELECT FROM oncekey.record AS record
    WHERE record.scope = :scope
      AND record.state <> 'expired'
      AND (record.state IN ('pending', 'in_progress', 'unknown') OR record.expires_at >
           {now})
    LIMIT :limit::bigint) AS counted;

-- name: note
-- Insert lines into the audit.
INSERT INTO oncekey.audit (
    at, scope, key_digest, incarnation, operation, fence, source, target, trigger, actor, who, why)
SELECT {now},
       line.scope, line.key_digest, line.incarnation, line.operation, line.fence, line.source, line.target,
       line.trigger, line.actor, line.who, line.why
FROM json_to_recordset(:notes::json) AS line(
    scope text, key_digest text, incarnation uuid, operation text, fence bigint, source text, target text,
    trigger text, actor text, who text, why text);

-- name: history
-- Read the audit lines of one key, oldest first.
SELECT line.*
FROM oncekey.audit AS line
WHERE line.scope = :scope AND line.key_digest = :key_digest AND line.id > :after::bigint
ORDER BY line.id
LIMIT :limit::bigint;

-- name: deletions
-- Read the latest audit lines about several keys of a scope, newest first.
SELECT line.*
FROM oncekey.audit AS line
WHERE line.scope = :scope AND line.key_digest = ''
ORDER BY line.id DESC
LIMIT :limit::bigint;

-- name: forget_notes
-- Delete a batch of old audit lines.
DELETE FROM oncekey.audit AS line
WHERE line.id IN (
    SELECT oldest.id
    FROM (SELECT first.id, first.at FROM oncekey.audit AS first ORDER BY first.id LIMIT :limit::bigint) AS oldest
    WHERE oldest.at <= {now} - :age::bigint)
RETURNING line.id;

-- name: beat
-- Store a worker's heartbeat, and which tasks it runs.
WITH {clock}
INSERT INTO oncekey.worker AS worker (name, tasks, started_at, seen_at, every, calls)
SELECT :name::text, :tasks::text, clock.now, clock.now, :every::bigint, :calls::text
FROM clock
ON CONFLICT (name) DO UPDATE SET tasks = excluded.tasks, seen_at = excluded.seen_at, every = excluded.every,
    calls = excluded.calls
RETURNING worker.seen_at;

-- name: leave
-- Delete the row of a worker that stops.
DELETE FROM oncekey.worker AS worker
WHERE worker.name = :name::text
RETURNING worker.name;

-- name: workers
-- List the workers, each with its last heartbeat.
WITH {clock}
SELECT clock.now, worker.name, worker.tasks, worker.started_at, worker.seen_at, worker.every, worker.calls
FROM clock LEFT JOIN oncekey.worker AS worker ON true
ORDER BY worker.started_at, worker.name;

-- name: forget_workers
-- Delete the rows of workers whose heartbeats ended long ago.
WITH {clock}
DELETE FROM oncekey.worker AS worker
USING clock
WHERE worker.seen_at + worker.every <= clock.now - :age::bigint
RETURNING worker.name;
