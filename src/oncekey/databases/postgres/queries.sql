-- The statements for PostgreSQL, one block each. Every one is served by record_pkey (scope, key). `:now` is NULL
-- outside of tests: clock_timestamp(), because now() is constant in a transaction. {durable} makes the commit durable
-- whatever the server's default is, inside the statement's own transaction. Statements run at READ COMMITTED; after a
-- serialisation failure under another default the driver repeats the statement. A record is two rows: `record`, which
-- every key has, and `work`, with the columns of unfinished, failed or phased work. They are read together, as the
-- view `whole`, and written by one statement: the record first, which locks it, then the row in `work`, if the record
-- was written. A statement that had to wait for the record continues with the current record, but with the old row in
-- `work`. A write that proves the version fails then, because every write raises it. For an owner, which proves only
-- the fence, `memo_version` shows whether the two rows belong together ({fits}).

-- part: now
-- The instant of the statement, in microseconds since 1970.
COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);

-- part: clock
-- The instant, read once.
clock AS MATERIALIZED (
    SELECT {now} AS now
);

-- part: durable_clock
-- The instant, read once, in a statement whose commit is durable.
clock AS MATERIALIZED (
    SELECT {now} AS now, {durable} AS durable
);

-- part: durable
CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply') THEN 'on'
                ELSE set_config('synchronous_commit', 'on', true) END;

-- part: cold
-- The columns of a record that are in `work`.
work.memo, work.intent, work.request, work.reconcile_after, COALESCE(work.reconcile_tries, 0) AS reconcile_tries;

-- part: fits
-- Whether the row in `work` is the one that belongs to this version of the record.
GREATEST(record.memo_version, 0) = COALESCE(work.memo_version, 0);

-- part: kept
-- Write the row in `work` of the record that was written, if it needs one.
kept AS (
    INSERT INTO oncekey.work AS work (
        incarnation, scope, key, memo_version, memo, intent, request, reconcile_after, reconcile_tries)
    SELECT written.incarnation, written.scope, written.key, written.memo_version, written.memo, written.intent,
           written.request, written.reconcile_after, written.reconcile_tries
    FROM written
    WHERE num_nonnulls(written.memo, written.intent, written.request, written.reconcile_after) > 0
       OR written.reconcile_tries > 0
    ON CONFLICT (incarnation) DO UPDATE
    SET memo_version = excluded.memo_version, memo = excluded.memo, intent = excluded.intent, request = excluded.request,
        reconcile_after = excluded.reconcile_after, reconcile_tries = excluded.reconcile_tries
);

-- part: emptied
-- Delete the row in `work` of the record that was written, if it needs none.
emptied AS (
    DELETE FROM oncekey.work AS work
    USING written
    WHERE work.incarnation = written.incarnation
      AND num_nonnulls(written.memo, written.intent, written.request, written.reconcile_after) = 0
      AND written.reconcile_tries = 0
);

-- part: forgotten
-- Delete the row in `work` of the former incarnation.
forgotten AS (
    DELETE FROM oncekey.work AS work USING written WHERE work.incarnation = :seen_incarnation::uuid
);

-- part: runs_again
-- The guard `RUNS_AGAIN`: stored effects and recovery allow another run.
CASE WHEN record.effects = 'phased'
            THEN record.recovery = 'resume'
                 AND (seen.intent IS NULL OR (seen.intent::json ->> 'repeatable_until')::bigint > clock.now)
            ELSE record.recovery = 'retry' AND seen.memo IS NULL AND seen.intent IS NULL END;

-- part: doubted
-- The beginning of every statement that marks a record unknown by its version.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'unknown', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key;

-- part: as_unknown
-- The end of every statement that begins with {doubted}. A failed lease (on_lease_expired="fail") goes to an operator
-- at once: no resolver checks it.
RETURNING clock.now, {hot}, record.memo_version, seen.memo, seen.intent, seen.request,
    CASE WHEN record.last_error = 'failed_lock_expired' THEN NULL ELSE clock.now END AS reconcile_after,
    seen.reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: find
-- Read one record; without a record, the row has only the store's clock.
SELECT clock.now, record.*
FROM (SELECT {now} AS now) AS clock
LEFT JOIN oncekey.whole AS record ON record.scope = :scope AND record.key = :key;

-- part: answer
-- The columns of a record that a replay needs.
record.scope, record.key, record.incarnation, record.operation, record.effects, record.fingerprint,
       record.response_status, record.response_headers, record.response_body, record.response_schema, record.expires_at;

-- name: recall_all
-- Read the stored responses of several completed keys at once.
-- LATERAL and LIMIT make the planner look up each key by itself, whatever number of keys it expects. The state is
-- compared outside: inside, the planner could scan an index of finished records that old statistics show as small.
SELECT {now} AS now, {answer}
FROM json_to_recordset(:asked::json) AS asked(scope text, key text)
CROSS JOIN LATERAL (
    SELECT * FROM oncekey.record AS one WHERE one.scope = asked.scope AND one.key = asked.key LIMIT 1) AS record
WHERE record.state = 'completed';

-- name: recall
-- Read the stored response of one completed key.
-- The row in `work` does not matter for a completed record's response, so it is not read.
SELECT {now} AS now, {answer}
FROM (SELECT * FROM oncekey.record AS one WHERE one.scope = :scope AND one.key = :key LIMIT 1) AS record
WHERE record.state = 'completed';

-- part: claimed
-- The insert of a claim; it inserts nothing if the key is taken.
INSERT INTO oncekey.record AS record (
        scope, key, {given_names},
        state, fence, version, owner, lease_until, deadline, attempts,
        recovery_point, created_at, last_run_at, expires_at, memo_version)
    SELECT
        :scope, :key, {given_values},
        'in_progress', 1, 1, :owner, clock.now + :lease::bigint, clock.now + :deadline::bigint, 1, 'started', clock.now, clock.now, clock.now + :ttl::bigint, 0
    FROM clock
    WHERE clock.durable = 'on'
    ON CONFLICT (scope, key) DO NOTHING;

-- part: nothing
-- The columns of `work` for a record that has no row there.
NULL::text AS memo, NULL::text AS intent, NULL::bytea AS request, NULL::bigint AS reconcile_after, 0 AS reconcile_tries;

-- name: claim
-- Insert the record of a new request, which becomes its owner (row 1).
-- Without a kept request there is no row in `work`; if another request's record is found that has one, which is rare,
-- the statement returns no row, and the caller reads again.
WITH {durable_clock}, claimed AS (
    {claimed}
    RETURNING {hot}
)
SELECT clock.now, claimed.*, {nothing} FROM clock, claimed
UNION ALL
SELECT clock.now, {hot}, {nothing} FROM clock, oncekey.record AS record
WHERE record.scope = :scope AND record.key = :key
  AND record.memo_version = 0 AND record.effects <> 'phased' AND record.state IN ('in_progress', 'completed');

-- name: claim_kept
-- Insert the record of a new PHASED request, with the request itself, so that a worker can resume it (row 1).
WITH {durable_clock}, claimed AS (
    {claimed}
    RETURNING {hot}
), kept AS (
    INSERT INTO oncekey.work AS work (incarnation, scope, key, request)
    SELECT claimed.incarnation, claimed.scope, claimed.key, :request::bytea FROM claimed
    -- A claim is repeated under its own incarnation, and the record may have been removed without this row.
    ON CONFLICT (incarnation) DO UPDATE SET memo_version = 0, memo = NULL, intent = NULL, request = excluded.request,
        reconcile_after = NULL, reconcile_tries = 0
)
SELECT clock.now, claimed.*, NULL::text AS memo, NULL::text AS intent, :request::bytea AS request,
       NULL::bigint AS reconcile_after, 0 AS reconcile_tries
FROM clock, claimed
UNION ALL
SELECT clock.now, {hot}, record.memo, record.intent, record.request, record.reconcile_after, record.reconcile_tries
FROM clock, oncekey.whole AS record WHERE record.scope = :scope AND record.key = :key;

-- name: take_over
-- Make a request or the completer the next owner of a stale or retryable record (rows 13 and 16).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'in_progress', entered = :entered::boolean, fence = record.fence + 1, version = record.version + 1,
    owner = :owner, lease_until = clock.now + :lease::bigint, deadline = clock.now + :deadline::bigint,
    attempts = record.attempts + 1, last_run_at = clock.now, last_error = NULL,
    -- If nothing was done yet, what a crash means is set by the handler that runs now; a deploy may have changed it.
    {renewed(seen.memo IS NULL AND seen.intent IS NULL; record.)},
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND ((record.state = 'in_progress' AND record.lease_until <= clock.now AND {runs_again})
       OR (record.state = 'failed_retryable'
           AND (record.effects <> 'outbox' OR (seen.memo IS NULL AND seen.intent IS NULL))))
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.intent, NULL::bigint AS reconcile_after, seen.reconcile_tries,
    CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN COALESCE(seen.request, :request::bytea)
         ELSE seen.request END AS request
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: supersede
-- Begin a new incarnation in the row of an expired record (row 31).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET {given_set},
    state = 'in_progress', outcome = NULL, fence = fence + 1, version = version + 1,
    owner = :owner, lease_until = clock.now + :lease::bigint, deadline = clock.now + :deadline::bigint,
    attempts = 1, recovery_point = 'started', {anew},
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    created_at = clock.now, last_run_at = clock.now, finished_at = NULL, expires_at = clock.now + :ttl::bigint,
    memo_version = 0
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.expires_at <= clock.now
  AND (record.state IN ('completed', 'expired') OR (record.state = 'failed_retryable' AND record.memo_version <= 0))
RETURNING clock.now, {hot}, record.memo_version,
    NULL::text AS memo, NULL::text AS intent, :request::bytea AS request, NULL::bigint AS reconcile_after,
    0 AS reconcile_tries
), {kept}, {forgotten}
SELECT written.* FROM written;

-- name: mark_unknown
-- Mark a record unknown whose lease has expired and that must not run again (row 15).
{doubted}
  AND record.state = 'in_progress' AND record.lease_until <= clock.now
{as_unknown};

-- name: renew
-- Extend the owner's lease, up to the deadline (row 4).
WITH {clock}
UPDATE oncekey.record AS record
SET version = version + 1,  -- the lease of an announced call is longer, and is not made shorter
    lease_until = GREATEST(record.lease_until, LEAST(clock.now + :lease::bigint, record.deadline))
FROM clock
WHERE record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND clock.now < record.deadline
RETURNING clock.now, record.lease_until;

-- name: settle_alone
-- Complete a record that has no row in `work`, with its response (row 7).
-- `settle_completed` for a record that had no row in `work` when it was claimed. Since then only the owner itself can
-- have added one, which `memo_version` shows; any other actor that adds one ends the ownership, and clears `owner`. (The
-- state shows that too, but by its index PostgreSQL would read all records that were ever in progress.)
WITH {durable_clock}
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = record.version + 1, owner = NULL, lease_until = NULL,
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, finished_at = clock.now, recovery_point = 'finished',
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.owner IS NOT NULL AND record.memo_version = 0 AND record.effects <> 'phased'
RETURNING clock.now, {hot}, {nothing};

-- name: settle_completed
-- Complete the owner's record, with its response (rows 7 and 8).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = record.version + 1, owner = NULL, lease_until = NULL,
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, finished_at = clock.now, recovery_point = 'finished',
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl),
    memo_version = CASE WHEN work.memo IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND ((record.state = 'in_progress' AND work.intent IS NULL)
       OR (record.state = 'unknown' AND (work.intent IS NULL OR record.effects = 'inline'))
       OR (record.state = 'failed_retryable' AND work.memo IS NULL
           AND (work.intent IS NULL OR record.effects = 'inline')))
RETURNING clock.now, {hot}, record.memo_version,
    work.memo, NULL::text AS intent, NULL::bytea AS request, NULL::bigint AS reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), cleared AS (
    UPDATE oncekey.work AS work
    SET memo_version = written.memo_version, intent = NULL, request = NULL, reconcile_after = NULL
    FROM written WHERE work.incarnation = written.incarnation
)
SELECT written.* FROM written;

-- name: settle_retryable
-- Release the owner's record, which executed nothing: a retry runs it (row 10).
WITH {durable_clock}
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND {fits} AND work.memo IS NULL AND work.intent IS NULL
RETURNING clock.now, {hot}, {cold};

-- name: settle_unknown
-- Mark the owner's record unknown: its call may have been executed (row 12).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'unknown', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    memo_version = CASE WHEN work.memo IS NULL AND work.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state = 'in_progress'
RETURNING clock.now, {hot}, record.memo_version,
    work.memo, work.intent, work.request, clock.now AS reconcile_after, COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: settle_handed_back
-- Release the owner's unfinished PHASED record: a retry or the completer resumes it (row 11).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = record.version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, attempts = record.attempts - :spared::integer,
    memo_version = CASE WHEN work.memo IS NULL AND work.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.state = 'in_progress' AND record.effects = 'phased' AND record.recovery = 'resume'
  AND (work.intent IS NULL OR (work.intent::json ->> 'repeatable_until')::bigint > clock.now)
RETURNING clock.now, {hot}, record.memo_version,
    work.memo, work.intent, work.request, clock.now + :resume_after::bigint AS reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: settle_deferred
-- Leave the owner's record pending: a worker delivers its parcel (row 3).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'pending', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = NULL,
    memo_version = 0
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.effects = 'outbox'
  AND {fits} AND work.memo IS NULL AND work.intent IS NULL
RETURNING clock.now, {hot}, record.memo_version,
    NULL::text AS memo, NULL::text AS intent, :request::bytea AS request, work.reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: discard
-- Delete the owner's record, whose handler was never called: the key is unused again (row 9).
WITH {durable_clock}, written AS (
DELETE FROM oncekey.record AS record
USING clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.memo_version <= 0
RETURNING clock.now, {hot}
), forgotten AS (
    DELETE FROM oncekey.work AS work USING written WHERE work.incarnation = written.incarnation
)
SELECT written.*, NULL::text AS memo, NULL::text AS intent, NULL::bytea AS request, NULL::bigint AS reconcile_after,
       0 AS reconcile_tries
FROM written;
