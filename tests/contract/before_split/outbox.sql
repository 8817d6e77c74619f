-- The outbox. Who writes about a parcel proves its id and its fence; who writes about its record locks that first, so that
-- two workers never wait for each other crosswise. `due_at` is when somebody may take a parcel next: when it is to be tried,
-- or, while it is held, when its lease runs out.

-- name: put_parcels
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
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

-- name: due
-- Who heads a line is looked up among the first thousand that are due. Only if nearly all of those wait for others is the
-- rest looked at: a long line must neither hide what stands behind it, nor be searched to its end each time.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
), known AS MATERIALIZED (
    SELECT ARRAY(SELECT json_array_elements_text(:topics::json)) AS topics
), front AS MATERIALIZED (
    SELECT parcel.id, parcel.due_at, parcel.place, parcel.order_by
    FROM oncekey.outbox AS parcel
    WHERE parcel.due_at <= (SELECT clock.now FROM clock)
      AND parcel.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
    ORDER BY parcel.due_at, parcel.place
    LIMIT 1000
), near AS MATERIALIZED (
    SELECT front.id, front.due_at, front.place
    FROM front
    WHERE front.order_by IS NULL OR NOT EXISTS (
        SELECT 1 FROM oncekey.outbox AS older
        WHERE older.order_by = front.order_by AND older.place < front.place)
), crowd AS MATERIALIZED (
    SELECT (SELECT count(*) FROM front) = 1000 AND (SELECT count(*) FROM near) < :limit::bigint AS waits
), first AS MATERIALIZED (
    SELECT near.id, near.due_at, near.place FROM near
    UNION
    SELECT head.id, head.due_at, head.place
    FROM (SELECT DISTINCT ON (parcel.order_by) parcel.id, parcel.due_at, parcel.place, parcel.aggregatetype
          FROM oncekey.outbox AS parcel
          WHERE parcel.order_by IS NOT NULL AND (SELECT crowd.waits FROM crowd)
          ORDER BY parcel.order_by, parcel.place) AS head
    WHERE head.due_at <= (SELECT clock.now FROM clock)
      AND head.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
    UNION
    (SELECT parcel.id, parcel.due_at, parcel.place
     FROM oncekey.outbox AS parcel
     WHERE parcel.order_by IS NULL AND (SELECT crowd.waits FROM crowd)
       AND parcel.due_at <= (SELECT clock.now FROM clock)
       AND parcel.aggregatetype = ANY ((SELECT known.topics FROM known)::text[])
     ORDER BY parcel.due_at, parcel.place
     LIMIT 1000)
), found AS MATERIALIZED (
    SELECT locked.id
    FROM (SELECT first.id FROM first ORDER BY first.due_at, first.place) AS wanted
    CROSS JOIN LATERAL (
        SELECT parcel.id FROM oncekey.outbox AS parcel
        WHERE parcel.id = wanted.id AND parcel.due_at <= (SELECT clock.now FROM clock)
        FOR UPDATE SKIP LOCKED) AS locked
    LIMIT :limit::bigint
)
UPDATE oncekey.outbox AS parcel
SET state = 'held', fence = fence + 1, attempts = attempts + 1, owner = :owner::text,
    lease_until = clock.now + :lease::bigint, due_at = clock.now + :lease::bigint
FROM clock, found
WHERE parcel.id = found.id AND parcel.due_at <= clock.now
RETURNING clock.now, parcel.*;

-- name: held_by
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now, parcel.*
FROM oncekey.outbox AS parcel
WHERE parcel.owner = :owner::text AND parcel.state = 'held';

-- name: find_parcel
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now, parcel.*
FROM oncekey.outbox AS parcel WHERE parcel.id = :id::uuid;

-- name: sent
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
DELETE FROM oncekey.outbox AS parcel
USING clock, json_to_recordset(:held::json) AS held(id uuid, fence bigint)
WHERE clock.durable = 'on' AND parcel.id = held.id AND parcel.fence = held.fence
  AND parcel.state = 'held' AND parcel.kind = 'emit'
RETURNING parcel.id;

-- name: remaining
SELECT parcel.id
FROM oncekey.outbox AS parcel, json_to_recordset(:held::json) AS held(id uuid, fence bigint)
WHERE parcel.id = held.id;

-- name: hand_back
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.outbox AS parcel
SET state = 'ready', owner = NULL, lease_until = NULL, due_at = clock.now, attempts = attempts - 1
FROM clock, json_to_recordset(:held::json) AS held(id uuid, fence bigint)
WHERE clock.durable = 'on' AND parcel.id = held.id AND parcel.fence = held.fence AND parcel.state = 'held'
RETURNING parcel.id;

-- name: again
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.outbox AS parcel
SET state = 'ready', owner = NULL, lease_until = NULL, due_at = clock.now + :after::bigint,
    attempts = attempts - :spared::integer, first_error = COALESCE(first_error, :error::text), last_error = :error::text
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING clock.now, parcel.*;

-- name: bury
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
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
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
DELETE FROM oncekey.outbox AS parcel
USING clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING parcel.id;

-- name: hold_record
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
SELECT clock.now, record.*
FROM oncekey.record AS record CROSS JOIN clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
FOR UPDATE OF record;

-- name: hold_parcel
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now, parcel.*
FROM oncekey.outbox AS parcel
WHERE parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
FOR UPDATE;

-- name: extend_parcel
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.outbox AS parcel
SET lease_until = GREATEST(parcel.lease_until, clock.now + :lease::bigint),
    due_at = GREATEST(parcel.lease_until, clock.now + :lease::bigint)
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.fence = :parcel_fence::bigint AND parcel.state = 'held'
RETURNING clock.now, parcel.*;

-- name: take_up
-- The call can be looked up from the moment it is announced.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
), announced AS (
UPDATE oncekey.record AS record
SET state = 'in_progress', fence = fence + 1, version = version + 1, owner = :owner::text, lease_until = NULL,
    last_error = NULL,
    intent = CASE WHEN record.memo IS NULL THEN json_build_object(
        'phase', :phase::text, 'downstream_key', :downstream_key::text, 'digest', :digest::text,
        'sends', :sends::integer,
        'first_sent_at', COALESCE((record.intent::json ->> 'first_sent_at')::bigint, clock.now),
        'send_by', clock.now + :send_window::bigint,
        'repeatable_until', CASE WHEN record.intent IS NULL THEN clock.now + :repeatable::bigint
                                 ELSE (record.intent::json ->> 'repeatable_until')::bigint END)::text END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.effects = 'outbox' AND record.state IN ('pending', 'in_progress')
RETURNING clock.now, record.*
), called AS (
    INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
    SELECT announced.incarnation, :phase::text, :downstream_key::text, announced.scope, announced.key,
           announced.operation, announced.now
    FROM announced
    WHERE announced.intent IS NOT NULL
    ON CONFLICT DO NOTHING
)
SELECT announced.* FROM announced;

-- name: deferred_result
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'in_progress', version = version + 1, memo = :memo::text, recovery_point = :recovery_point::text,
    intent = NULL, owner = :owner::text, lease_until = NULL, last_error = NULL, reconcile_after = NULL
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.effects = 'outbox' AND record.state IN ('in_progress', 'unknown', 'pending') AND record.memo IS NULL
RETURNING clock.now, record.*;

-- name: pend
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = :error::text,
    intent = CASE WHEN :unsent::boolean THEN NULL ELSE record.intent END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.effects = 'outbox' AND record.state = 'in_progress'
RETURNING clock.now, record.*;

-- name: retake_parcel
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.outbox AS parcel
SET state = 'held', fence = fence + 1, owner = :owner::text,
    lease_until = clock.now + :lease::bigint, due_at = clock.now + :lease::bigint
FROM clock
WHERE clock.durable = 'on' AND parcel.id = :id::uuid AND parcel.incarnation = :incarnation::uuid
RETURNING clock.now, parcel.*;

-- name: bring_back
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
INSERT INTO oncekey.outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at, first_error, last_error)
SELECT dead.id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
       'ready', :attempts::integer, fence, clock.now, created_at, first_error, last_error
FROM oncekey.dead_letter AS dead CROSS JOIN clock
WHERE clock.durable = 'on' AND dead.id = :id::uuid AND dead.kind = :kind::text
RETURNING id;

-- name: drop_dead_letter
DELETE FROM oncekey.dead_letter AS dead
WHERE dead.id = :id::uuid AND dead.kind = :kind::text
RETURNING dead.id;

-- name: find_dead_letter
SELECT dead.* FROM oncekey.dead_letter AS dead WHERE dead.id = :id::uuid;

-- name: dead_letters
SELECT dead.* FROM oncekey.dead_letter AS dead
WHERE (dead.died_at, dead.id) > (:died_at::bigint, :id::uuid)
ORDER BY dead.died_at, dead.id
LIMIT :limit::bigint;
