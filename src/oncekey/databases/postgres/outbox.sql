-- The outbox. A write to a parcel proves its id and its fence; a write to its record locks the record first, so that two
-- workers never deadlock. `due_at` is when a worker may claim a parcel next: at its next attempt or, while a worker
-- holds it, at the end of its lease.

-- name: put_parcels
-- Insert the parcels of a handler, in the transaction of its business rows.
WITH {durable_clock}
INSERT INTO oncekey.outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at)
SELECT given.id, given.topic, COALESCE(given.order_by, given.incarnation::text), given.topic, given.payload, given.kind,
       given.scope, given.key, given.incarnation, given.downstream_key, given.position, given.order_by,
       'ready', 0, 0, clock.now, clock.now
FROM clock, json_to_recordset(:parcels::json) AS given(
    id uuid, topic text, payload text, kind text, scope text, key text, incarnation uuid, downstream_key text,
    position integer, order_by text)
WHERE clock.durable = 'on'
ORDER BY given.position
RETURNING id;

-- part: ours(row)
-- A scope that begins with a digit has its namespace first.
(substr({row}.scope, 1, 1) NOT BETWEEN '0' AND '9' OR starts_with({row}.scope, :beginning::text))

-- name: due
-- Claim the parcels that a worker delivers next, longest waiting first.
-- The first parcel of each order is looked up among the first thousand that are due. The rest is read only if nearly all
-- of those wait for others, in one step per order: a long order must neither hide the parcels behind it, nor be
-- searched to its end. At most `careful` of the parcels are claimed that are a request's own call or were attempted
-- before. A parcel that was found is locked by its row address (`spot`), and skipped if it has moved since. Without
-- statistics, a planner that sees the limit assumes that there are fewer rows than that: it would read and sort all due
-- parcels for every claim. So the limit is hidden from it; then it uses the index, and stops.
WITH RECURSIVE {clock}, known AS MATERIALIZED (
    SELECT ARRAY(SELECT json_array_elements_text(:topics::json)) AS topics
), front AS MATERIALIZED (
    SELECT parcel.ctid AS spot, parcel.due_at, parcel.place, parcel.order_by,
           parcel.kind = 'defer' OR parcel.attempts > 0 AS careful
    FROM oncekey.outbox AS parcel
    WHERE parcel.due_at <= (SELECT clock.now FROM clock)
      AND parcel.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
      AND {ours(parcel)}
    ORDER BY parcel.due_at, parcel.place
    LIMIT (SELECT GREATEST(1000, :limit::bigint))
), near AS MATERIALIZED (
    SELECT front.spot, front.due_at, front.place, front.careful
    FROM front
    WHERE front.order_by IS NULL
    UNION ALL
    SELECT leader.spot, leader.due_at, leader.place, leader.careful
    FROM (SELECT DISTINCT ON (front.order_by) front.*
          FROM front
          WHERE front.order_by IS NOT NULL
          ORDER BY front.order_by, front.place) AS leader
    WHERE NOT EXISTS (
        SELECT 1 FROM oncekey.outbox AS older
        WHERE older.order_by = leader.order_by AND older.place < leader.place)
), crowd AS MATERIALIZED (
    SELECT (SELECT count(*) FROM front) >= 1000 AND (SELECT count(*) FROM near) < LEAST(100, :limit::bigint) AS waits
), head AS (
    (SELECT parcel.ctid AS spot, parcel.due_at, parcel.place, parcel.order_by, parcel.aggregatetype, parcel.kind,
            parcel.attempts, parcel.scope
     FROM oncekey.outbox AS parcel
     WHERE parcel.order_by IS NOT NULL AND (SELECT crowd.waits FROM crowd)
     ORDER BY parcel.order_by, parcel.place
     LIMIT 1)
    UNION ALL
    SELECT another.*
    FROM head CROSS JOIN LATERAL (
        SELECT parcel.ctid AS spot, parcel.due_at, parcel.place, parcel.order_by, parcel.aggregatetype, parcel.kind,
               parcel.attempts, parcel.scope
        FROM oncekey.outbox AS parcel
        WHERE parcel.order_by > head.order_by
        ORDER BY parcel.order_by, parcel.place
        LIMIT 1) AS another
), first AS MATERIALIZED (
    -- The near parcels; or the first of each order, and the first ones without an order: all near ones are among them.
    SELECT near.spot, near.due_at, near.place, near.careful FROM near WHERE NOT (SELECT crowd.waits FROM crowd)
    UNION ALL
    SELECT head.spot, head.due_at, head.place, head.kind = 'defer' OR head.attempts > 0
    FROM head
    WHERE head.due_at <= (SELECT clock.now FROM clock)
      AND head.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
      AND {ours(head)}
    UNION ALL
    (SELECT parcel.ctid, parcel.due_at, parcel.place, parcel.kind = 'defer' OR parcel.attempts > 0
     FROM oncekey.outbox AS parcel
     WHERE parcel.order_by IS NULL AND (SELECT crowd.waits FROM crowd)
       AND parcel.due_at <= (SELECT clock.now FROM clock)
       AND parcel.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
       AND {ours(parcel)}
     ORDER BY parcel.due_at, parcel.place
     LIMIT 1000)
), wanted AS MATERIALIZED (
    SELECT taken.spot
    FROM (SELECT first.spot, first.due_at, first.place FROM first WHERE NOT first.careful
          UNION ALL
          (SELECT first.spot, first.due_at, first.place
           FROM first
           WHERE first.careful
           ORDER BY first.due_at, first.place
           LIMIT :careful::bigint)) AS taken
    ORDER BY taken.due_at, taken.place
), found AS MATERIALIZED (
    SELECT locked.spot
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT parcel.ctid AS spot FROM oncekey.outbox AS parcel
        WHERE parcel.ctid = wanted.spot AND parcel.due_at <= (SELECT clock.now FROM clock)
        FOR UPDATE SKIP LOCKED) AS locked
    LIMIT :limit::bigint
)
UPDATE oncekey.outbox AS parcel
SET state = 'held', fence = fence + 1, attempts = attempts + 1, owner = :owner::text,
    lease_until = clock.now + :lease::bigint, due_at = clock.now + :lease::bigint
FROM clock
WHERE parcel.ctid = ANY (ARRAY(SELECT found.spot FROM found)) AND parcel.due_at <= clock.now
RETURNING parcel.place, parcel.id, parcel.kind, parcel.scope, parcel.key, parcel.incarnation, parcel.aggregatetype,
    parcel.payload, parcel.downstream_key, parcel.position, parcel.order_by, parcel.fence, parcel.attempts,
    parcel.lease_until, parcel.created_at, parcel.first_error, parcel.last_error;

-- name: held_by
-- Read the parcels that a worker has claimed, after the reply was lost.
SELECT {now} AS now, parcel.*
FROM oncekey.outbox AS parcel
WHERE parcel.owner = :owner::text AND parcel.state = 'held';

-- name: find_parcel
-- Read one parcel.
SELECT {now} AS now, parcel.*
FROM oncekey.outbox AS parcel WHERE parcel.id = :id::uuid;

-- name: sent
-- Delete messages that were delivered.
-- Each parcel is looked up by its id: for a join, the planner would scan the held parcels.
WITH {durable_clock}, ours AS MATERIALIZED (
    SELECT locked.spot
    FROM json_to_recordset(:held::json) AS held(id uuid, fence bigint)
    CROSS JOIN LATERAL (
        SELECT parcel.ctid AS spot FROM oncekey.outbox AS parcel
        WHERE parcel.id = held.id AND parcel.fence = held.fence AND parcel.state = 'held' AND parcel.kind = 'emit'
        FOR UPDATE) AS locked
)
DELETE FROM oncekey.outbox AS parcel
USING clock
WHERE clock.durable = 'on' AND parcel.ctid = ANY (ARRAY(SELECT ours.spot FROM ours))
RETURNING parcel.id;

-- name: remaining
-- Read which parcels are still in the outbox, after the reply to `sent` was lost.
SELECT parcel.id
FROM oncekey.outbox AS parcel
WHERE parcel.id = ANY (ARRAY(SELECT held.id FROM json_to_recordset(:held::json) AS held(id uuid, fence bigint)));

-- name: hand_back
-- Release parcels that a worker claimed and did not begin; the attempt does not count.
WITH {durable_clock}, ours AS MATERIALIZED (
    SELECT locked.spot
    FROM json_to_recordset(:held::json) AS held(id uuid, fence bigint)
    CROSS JOIN LATERAL (
        SELECT parcel.ctid AS spot FROM oncekey.outbox AS parcel
        WHERE parcel.id = held.id AND parcel.fence = held.fence AND parcel.state = 'held'
        FOR UPDATE) AS locked
)
UPDATE oncekey.outbox AS parcel
SET state = 'ready', owner = NULL, lease_until = NULL, due_at = clock.now, attempts = attempts - 1
FROM clock
WHERE clock.durable = 'on' AND parcel.ctid = ANY (ARRAY(SELECT ours.spot FROM ours))
RETURNING parcel.id;

-- name: again
-- Release a parcel after a failed attempt, due again later.
WITH {durable_clock}
UPDATE oncekey.outbox AS parcel
SET state = 'ready', owner = NULL, lease_until = NULL, due_at = clock.now + :after::bigint,
    attempts = attempts - :spared::integer, first_error = COALESCE(first_error, :error::text), last_error = :error::text
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING clock.now, parcel.*;

-- name: bury
-- Copy a parcel into the dead letters; `drop_parcel` then deletes it from the outbox.
WITH {durable_clock}
INSERT INTO oncekey.dead_letter (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    attempts, fence, created_at, first_error, last_error, died_at)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
       attempts, fence, created_at, COALESCE(first_error, :error::text), :error::text, clock.now
FROM clock, (
    SELECT held.* FROM oncekey.outbox AS held
    WHERE held.id = :id::uuid AND held.fence = :parcel_fence::bigint AND held.state = 'held'
    FOR UPDATE) AS parcel
WHERE clock.durable = 'on'
RETURNING id;

-- name: drop_parcel
-- Delete a parcel from the outbox.
WITH {durable_clock}
DELETE FROM oncekey.outbox AS parcel
USING clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING parcel.id;

-- name: hold_record
-- Lock one record and read it.
WITH {durable_clock}
SELECT clock.now, record.*
FROM clock CROSS JOIN oncekey.hold(:scope, :key) AS record
WHERE clock.durable = 'on';

-- name: hold_parcel
-- Lock one claimed parcel and read it.
SELECT {now} AS now, parcel.*
FROM oncekey.outbox AS parcel
WHERE parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
FOR UPDATE;

-- name: extend_parcel
-- Extend a worker's lease of a parcel.
WITH {durable_clock}
UPDATE oncekey.outbox AS parcel
SET lease_until = GREATEST(parcel.lease_until, clock.now + :lease::bigint),
    due_at = GREATEST(parcel.lease_until, clock.now + :lease::bigint)
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING clock.now, parcel.*;

-- name: take_up
-- Make a worker the owner of a deferred record, and announce its call (row 24).
-- The call can be looked up from the moment it is announced.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'in_progress', fence = record.fence + 1, version = record.version + 1, owner = :owner::text, lease_until = NULL,
    last_error = NULL,
    memo_version = record.version + 1
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.effects = 'outbox' AND record.state IN ('pending', 'in_progress')
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.request, seen.reconcile_after, seen.reconcile_tries,
    CASE WHEN seen.memo IS NULL THEN json_build_object(
        'phase', :phase::text, 'downstream_key', :downstream_key::text, 'digest', :digest::text,
        'sends', :sends::integer,
        'first_sent_at', COALESCE((seen.intent::json ->> 'first_sent_at')::bigint, clock.now),
        'send_by', clock.now + :send_window::bigint,
        'repeatable_until', CASE WHEN seen.intent IS NULL THEN clock.now + :repeatable::bigint
                                 ELSE (seen.intent::json ->> 'repeatable_until')::bigint END)::text END AS intent
), {kept}, called AS (
    INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
    SELECT written.incarnation, :phase::text, :downstream_key::text, written.scope, written.key, written.operation,
           written.now
    FROM written
    WHERE written.intent IS NOT NULL
    ON CONFLICT DO NOTHING
)
SELECT written.* FROM written;

-- name: deferred_result
-- Store the result of a deferred call (row 6).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'in_progress', version = record.version + 1, recovery_point = :recovery_point::text, owner = :owner::text,
    lease_until = NULL, last_error = NULL,
    memo_version = CASE WHEN :memo::text IS NULL THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.effects = 'outbox' AND record.state IN ('in_progress', 'unknown', 'pending') AND work.memo IS NULL
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, NULL::text AS intent, work.request, NULL::bigint AS reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: pend
-- Leave a deferred record pending until the next attempt (row 26).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'pending', version = record.version + 1, owner = NULL, lease_until = NULL, last_error = :error::text,
    memo_version = CASE WHEN work.memo IS NULL AND (:unsent::boolean OR work.intent IS NULL) THEN 0 ELSE record.version + 1 END
FROM clock LEFT JOIN oncekey.work AS work ON work.incarnation = :incarnation::uuid
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND {fits}
  AND record.effects = 'outbox' AND record.state = 'in_progress'
RETURNING clock.now, {hot}, record.memo_version,
    work.memo, CASE WHEN :unsent::boolean THEN NULL ELSE work.intent END AS intent, work.request, work.reconcile_after,
    COALESCE(work.reconcile_tries, 0) AS reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: park_record
-- Mark a deferred record unknown: its call must not be repeated or failed too often (rows 25 and 27).
{doubted}
  AND record.effects = 'outbox' AND record.state IN ('pending', 'in_progress')
{as_unknown};

-- name: retake_parcel
-- Claim a parcel again for the worker that has the result of its call.
WITH {durable_clock}
UPDATE oncekey.outbox AS parcel
SET state = 'held', fence = fence + 1, owner = :owner::text,
    lease_until = clock.now + :lease::bigint, due_at = clock.now + :lease::bigint
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.incarnation = :incarnation::uuid
RETURNING clock.now, parcel.*;

-- name: bring_back
-- Copy a dead letter back into the outbox; `drop_dead_letter` then deletes it there.
WITH {durable_clock}
INSERT INTO oncekey.outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at, first_error, last_error)
SELECT dead.id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
       'ready', :attempts::integer, fence, clock.now, created_at, first_error, last_error
FROM oncekey.dead_letter AS dead CROSS JOIN clock
WHERE clock.durable = 'on' AND dead.id = :id::uuid AND dead.kind = :kind::text
  AND (:died_at::bigint IS NULL OR dead.died_at = :died_at::bigint)
RETURNING id;

-- name: drop_dead_letter
-- Delete one dead letter.
DELETE FROM oncekey.dead_letter AS dead
WHERE dead.id = :id::uuid AND dead.kind = :kind::text
  AND (:died_at::bigint IS NULL OR dead.died_at = :died_at::bigint)
RETURNING dead.id;

-- name: find_dead_letter
-- Read one dead letter.
SELECT dead.* FROM oncekey.dead_letter AS dead WHERE dead.id = :id::uuid;

-- name: dead_letters
-- List dead letters, oldest first.
SELECT dead.* FROM oncekey.dead_letter AS dead
WHERE (dead.died_at, dead.id) > (:died_at::bigint, :id::uuid)
ORDER BY dead.died_at, dead.id
LIMIT :limit::bigint;
