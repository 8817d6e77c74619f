-- The outbox. Who writes about a parcel proves its id and its fence. `due_at` is when somebody may take a parcel next: when
-- it is to be tried, or, while it is held, when its lease runs out. SQLite has one writer, so nothing needs a lock of its own.

-- name: put_parcels
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at)
SELECT json_extract(given.value, '$.id'), json_extract(given.value, '$.topic'),
       COALESCE(json_extract(given.value, '$.order_by'), json_extract(given.value, '$.incarnation')), json_extract(given.value, '$.topic'),
       json_extract(given.value, '$.payload'), json_extract(given.value, '$.kind'), json_extract(given.value, '$.scope'), json_extract(given.value, '$.key'),
       json_extract(given.value, '$.incarnation'), json_extract(given.value, '$.downstream_key'), json_extract(given.value, '$.position'),
       json_extract(given.value, '$.order_by'), 'ready', 0, 0, COALESCE(:now, (SELECT now FROM oncekey_clock)),
       COALESCE(:now, (SELECT now FROM oncekey_clock))
FROM json_each(:parcels) AS given
ORDER BY json_extract(given.value, '$.position')
RETURNING id;

-- name: due
-- Of parcels that are to be handled with care (a request's own call, and what somebody has tried before) at most `careful`
-- are taken, counted among those that are next.
UPDATE oncekey_outbox
SET state = 'held', fence = fence + 1, attempts = attempts + 1, owner = :owner,
    lease_until = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease
WHERE place IN (
    SELECT ranked.place
    FROM (
        SELECT next.place, next.careful,
               row_number() OVER (PARTITION BY next.careful ORDER BY next.due_at, next.place) AS turn
        FROM (
            SELECT parcel.place, parcel.due_at, parcel.kind = 'defer' OR parcel.attempts > 0 AS careful
            FROM oncekey_outbox AS parcel
            WHERE parcel.due_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
              AND parcel.aggregatetype IN (SELECT value FROM json_each(:topics))
              AND (parcel.order_by IS NULL OR NOT EXISTS (
                  SELECT 1 FROM oncekey_outbox AS older
                  WHERE older.order_by = parcel.order_by AND older.place < parcel.place))
            ORDER BY parcel.due_at, parcel.place
            LIMIT :limit) AS next) AS ranked
    WHERE NOT ranked.careful OR ranked.turn <= :careful)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: held_by
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, parcel.* FROM oncekey_outbox AS parcel
WHERE parcel.owner = :owner AND parcel.state = 'held';

-- name: find_parcel
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, parcel.*
FROM oncekey_outbox AS parcel WHERE parcel.id = :id;

-- name: sent
DELETE FROM oncekey_outbox
WHERE (id, fence) IN (SELECT json_extract(held.value, '$.id'), json_extract(held.value, '$.fence') FROM json_each(:held) AS held)
  AND state = 'held' AND kind = 'emit'
RETURNING id;

-- name: remaining
SELECT parcel.id FROM oncekey_outbox AS parcel
WHERE parcel.id IN (SELECT json_extract(held.value, '$.id') FROM json_each(:held) AS held);

-- name: hand_back
UPDATE oncekey_outbox
SET state = 'ready', owner = NULL, lease_until = NULL, attempts = attempts - 1,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock))
WHERE (id, fence) IN (SELECT json_extract(held.value, '$.id'), json_extract(held.value, '$.fence') FROM json_each(:held) AS held)
  AND state = 'held'
RETURNING id;

-- name: again
UPDATE oncekey_outbox
SET state = 'ready', owner = NULL, lease_until = NULL,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :after,
    attempts = attempts - :spared, first_error = COALESCE(first_error, :error), last_error = :error
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: bury
INSERT INTO oncekey_dead_letter (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    attempts, fence, created_at, first_error, last_error, died_at)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
       attempts, fence, created_at, COALESCE(first_error, :error), :error,
       COALESCE(:now, (SELECT now FROM oncekey_clock))
FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
RETURNING id;

-- name: drop_parcel
DELETE FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
RETURNING id;

-- name: hold_record
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, record.*
FROM oncekey_record AS record WHERE record.scope = :scope AND record.key = :key;

-- name: hold_parcel
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, parcel.*
FROM oncekey_outbox AS parcel
WHERE parcel.id = :id AND parcel.fence = :parcel_fence AND parcel.state = 'held';

-- name: extend_parcel
UPDATE oncekey_outbox
SET lease_until = max(lease_until, COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease),
    due_at = max(lease_until, COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease)
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: take_up
UPDATE oncekey_record
SET state = 'in_progress', fence = fence + 1, version = version + 1, owner = :owner, lease_until = NULL,
    last_error = NULL,
    intent = CASE WHEN memo IS NULL THEN json_object(
        'phase', :phase, 'downstream_key', :downstream_key, 'digest', :digest, 'sends', :sends,
        'first_sent_at', COALESCE(json_extract(intent, '$.first_sent_at'), COALESCE(:now, (SELECT now FROM oncekey_clock))),
        'send_by', COALESCE(:now, (SELECT now FROM oncekey_clock)) + :send_window,
        'repeatable_until', CASE WHEN intent IS NULL
            THEN COALESCE(:now, (SELECT now FROM oncekey_clock)) + :repeatable
            ELSE json_extract(intent, '$.repeatable_until') END) END
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND effects = 'outbox' AND state IN ('pending', 'in_progress')
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: deferred_result
UPDATE oncekey_record
SET state = 'in_progress', version = version + 1, memo = :memo, recovery_point = :recovery_point, intent = NULL,
    owner = :owner, lease_until = NULL, last_error = NULL, reconcile_after = NULL
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state IN ('in_progress', 'unknown', 'pending') AND memo IS NULL
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: pend
UPDATE oncekey_record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = :error,
    intent = CASE WHEN :unsent THEN NULL ELSE intent END
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state = 'in_progress'
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: park_record
{doubted}
  AND effects = 'outbox' AND state IN ('pending', 'in_progress')
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: retake_parcel
UPDATE oncekey_outbox
SET state = 'held', fence = fence + 1, owner = :owner,
    lease_until = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease
WHERE id = :id AND incarnation = :incarnation
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: bring_back
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at, first_error, last_error)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
       'ready', :attempts, fence, COALESCE(:now, (SELECT now FROM oncekey_clock)),
       created_at, first_error, last_error
FROM oncekey_dead_letter WHERE id = :id AND kind = :kind
RETURNING id;

-- name: drop_dead_letter
DELETE FROM oncekey_dead_letter WHERE id = :id AND kind = :kind
RETURNING id;

-- name: find_dead_letter
SELECT dead.* FROM oncekey_dead_letter AS dead WHERE dead.id = :id;

-- name: dead_letters
SELECT dead.* FROM oncekey_dead_letter AS dead
WHERE (dead.died_at, dead.id) > (:died_at, :id)
ORDER BY dead.died_at, dead.id
LIMIT :limit;
