-- LOCAL in one commit: lock and read come first, and the finished record is written once, last.
-- `begun` is the lock's number, stored in the transaction. If it is missing at the end, this is not the transaction that
-- was begun, and nothing may be stored in it: `seal`, with the COMMIT in the same message, fails with 22012 (division by
-- zero). `enter` is `lock` and `seal` is `commit_new` for the messages of BEGIN and COMMIT (migrations 0007 and 0012).
-- `enter` returns one row for a new key whose lock this transaction holds, and none in all other cases.

-- part: begun
NULLIF(current_setting('oncekey.begun', true), '')::bigint

-- part: begun_here
-- Divides by zero in any transaction other than the one that was begun.
1 / length(COALESCE(current_setting('oncekey.begun', true), '')) IS NOT NULL

-- name: lock
-- Lock a key for a LOCAL request without waiting, and read its record.
-- `lock_request_2` is the second form of this function; migration 0009 drops the first.
SELECT look.now, look.locked, look.other, look.begun, (look.seen).*
FROM oncekey.lock_request_2(
    :lock::bigint, :family::integer, :mark::integer, convert_from(:scope::bytea, 'UTF8'),
    convert_from(:key::bytea, 'UTF8'), :now::bigint, :lease_ms::integer, :deadline_ms::integer) AS look;

-- name: enter
-- Lock a key and look for its record, in one message with BEGIN.
-- A row: the key is new, and this transaction holds its lock. A notice: another request holds the lock and there is no
-- record, or the notice contains the stored response. Neither: `lock` follows. `enter_2` is its second version.
SELECT WHERE oncekey.enter_2(:lock, :family, :mark, :scope, :key, :now, :lease_ms, :deadline_ms);

-- name: seal
-- Insert the completed record of a LOCAL request, in one message with COMMIT (row 2).
SELECT oncekey.seal(:given, :response_body, :now, :guess)
WHERE {begun_here};

-- name: was_sealed
-- Check whether `seal` was committed, after its reply was lost.
SELECT oncekey.was_sealed(:given::bytea) AS committed;

-- name: held
-- Check whether any transaction holds the lock of a key, without taking it.
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (classid::bigint << 32 | objid::bigint) = :lock::bigint) AS held;

-- name: holder
-- Read which request holds the lock of a key, without taking it.
SELECT oncekey.lock_holder(:lock::bigint, :family::integer, :mark::integer) AS holder;

-- name: commit_new
-- Insert the completed record of a LOCAL request (row 2).
WITH {durable_clock}
INSERT INTO oncekey.record (
    scope, key, {given_names},
    state, outcome, fence, version, deadline, attempts, recovery_point,
    response_status, response_headers, response_body, response_schema,
    created_at, last_run_at, finished_at, expires_at, memo_version)
SELECT
    :scope, :key, {given_values},
    'completed', :outcome, 1, 1, clock.now + :deadline::bigint, 1, 'finished',
    :response_status::integer, :response_headers, :response_body::bytea, :response_schema::integer,
    clock.now, clock.now, clock.now, clock.now + :ttl::bigint, 0
FROM clock
WHERE clock.durable = 'on'
ON CONFLICT (scope, key) DO NOTHING
RETURNING expires_at, {begun} AS begun;

-- name: commit_retryable
-- Complete a retryable LOCAL record (row 17).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, entered = :entered::boolean, fence = fence + 1, version = version + 1,
    attempts = attempts + 1, recovery_point = 'finished',
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, last_run_at = clock.now, finished_at = clock.now,
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl), memo_version = 0
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'failed_retryable' AND record.effects = 'local'
  AND record.memo_version <= 0 AND record.expires_at > clock.now
RETURNING record.expires_at, {begun} AS begun
), {forgotten}
SELECT written.* FROM written;

-- name: commit_anew
-- Store a completed LOCAL request in the row of an expired record (row 31).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET {given_set},
    state = 'completed', outcome = :outcome, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = clock.now + :deadline::bigint,
    attempts = 1, recovery_point = 'finished', {anew},
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    created_at = clock.now, last_run_at = clock.now, finished_at = clock.now,
    expires_at = clock.now + :ttl::bigint, memo_version = 0
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.expires_at <= clock.now
  AND (record.state IN ('completed', 'expired') OR (record.state = 'failed_retryable' AND record.memo_version <= 0))
RETURNING record.expires_at, {begun} AS begun
), {forgotten}
SELECT written.* FROM written;

-- part: deferred
record.incarnation, record.scope, record.key, record.memo_version, NULL::text AS memo, NULL::text AS intent,
    :request::bytea AS request, NULL::bigint AS reconcile_after, 0 AS reconcile_tries, record.expires_at, {begun} AS begun

-- name: defer_new
-- Insert the pending record of an OUTBOX request (row 3).
WITH {durable_clock}, written AS (
INSERT INTO oncekey.record AS record (
    scope, key, {given_names},
    state, fence, version, deadline, attempts, recovery_point,
    created_at, last_run_at, expires_at, memo_version)
SELECT
    :scope, :key, {given_values},
    'pending', 1, 1, clock.now + :deadline::bigint, 1, 'started', clock.now, clock.now, clock.now + :ttl::bigint, 0
FROM clock
WHERE clock.durable = 'on' AND :effects = 'outbox'
ON CONFLICT (scope, key) DO NOTHING
RETURNING {deferred}
), {kept}
SELECT written.expires_at, written.begun FROM written;

-- name: defer_anew
-- Store a pending OUTBOX request in the row of an expired record (row 31).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET {given_set},
    state = 'pending', outcome = NULL, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = clock.now + :deadline::bigint,
    attempts = 1, recovery_point = 'started', {anew},
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    created_at = clock.now, last_run_at = clock.now, finished_at = NULL, expires_at = clock.now + :ttl::bigint, memo_version = 0
FROM clock
WHERE clock.durable = 'on' AND :effects = 'outbox' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.expires_at <= clock.now
  AND (record.state IN ('completed', 'expired') OR (record.state = 'failed_retryable' AND record.memo_version <= 0))
RETURNING {deferred}
), {kept}, {forgotten}
SELECT written.expires_at, written.begun FROM written;
