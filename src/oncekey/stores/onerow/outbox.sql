-- The outbox. A write to a parcel proves its id and its fence. `due_at` is when a worker may claim a parcel next: at its
-- next attempt or, while a worker holds it, at the end of its lease.

-- name: held_by
-- Read the parcels that a worker has claimed, after the reply was lost.
SELECT {now} AS now, parcel.* FROM oncekey_outbox AS parcel
WHERE parcel.owner = :owner AND parcel.state = 'held';

-- name: find_parcel
-- Read one parcel.
SELECT {now} AS now, parcel.*
FROM oncekey_outbox AS parcel WHERE parcel.id = :id;

-- name: again
-- Release a parcel after a failed attempt, due again later.
UPDATE oncekey_outbox
SET state = 'ready', owner = NULL, lease_until = NULL,
    due_at = {now} + :after,
    attempts = attempts - :spared, first_error = COALESCE(first_error, :error), last_error = :error
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{giving_parcel};

-- name: bury
-- Copy a parcel into the dead letters; `drop_parcel` then deletes it from the outbox.
INSERT INTO oncekey_dead_letter (
    id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
    attempts, fence, created_at, first_error, last_error, died_at)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
       attempts, fence, created_at, COALESCE(first_error, :error), :error,
       {now}
FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{written(id)};

-- name: drop_parcel
-- Delete a parcel from the outbox.
DELETE FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{written(id)};

-- name: hold_record
-- Lock one record and read it.
SELECT {now} AS now, record.*
FROM oncekey_record AS record WHERE record.scope = :scope AND record.`key` = :key
{locked};

-- name: hold_parcel
-- Lock one claimed parcel and read it.
SELECT {now} AS now, parcel.*
FROM oncekey_outbox AS parcel
WHERE parcel.id = :id AND parcel.fence = :parcel_fence AND parcel.state = 'held'
{locked};

-- name: extend_parcel
-- Extend a worker's lease of a parcel.
UPDATE oncekey_outbox
SET lease_until = {greatest}(lease_until, {now} + :lease),
    due_at = {greatest}(lease_until, {now} + :lease)
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{giving_parcel};

-- name: take_up
-- Make a worker the owner of a deferred record, and announce its call (row 24).
UPDATE oncekey_record
SET state = 'in_progress', fence = fence + 1, version = version + 1, owner = :owner, lease_until = NULL,
    last_error = NULL,
    intent = CASE WHEN memo IS NULL THEN json_object(
        'phase', :phase, 'downstream_key', :downstream_key, 'digest', :digest, 'sends', :sends,
        'first_sent_at', COALESCE({json_number(intent; first_sent_at)}, {now}),
        'send_by', {now} + :send_window,
        'repeatable_until', CASE WHEN intent IS NULL
            THEN {now} + :repeatable
            ELSE {json_number(intent; repeatable_until)} END) END
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND effects = 'outbox' AND state IN ('pending', 'in_progress')
{giving}
{announced};

-- name: deferred_result
-- Store the result of a deferred call (row 6).
UPDATE oncekey_record
SET state = 'in_progress', version = version + 1, memo = :memo, recovery_point = :recovery_point, intent = NULL,
    owner = :owner, lease_until = NULL, last_error = NULL, reconcile_after = NULL
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state IN ('in_progress', 'unknown', 'pending') AND memo IS NULL
{giving};

-- name: pend
-- Leave a deferred record pending until the next attempt (row 26).
UPDATE oncekey_record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = :error,
    intent = CASE WHEN :unsent THEN NULL ELSE intent END
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state = 'in_progress'
{giving};

-- name: park_record
-- Mark a deferred record unknown: its call must not be repeated or failed too often (rows 25 and 27).
{doubted}
  AND effects = 'outbox' AND state IN ('pending', 'in_progress')
{giving};

-- name: retake_parcel
-- Claim a parcel again for the worker that has the result of its call.
UPDATE oncekey_outbox
SET state = 'held', fence = fence + 1, owner = :owner,
    lease_until = {now} + :lease,
    due_at = {now} + :lease
WHERE id = :id AND incarnation = :incarnation
{giving_parcel};

-- name: bring_back
-- Copy a dead letter back into the outbox; `drop_dead_letter` then deletes it there.
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at, first_error, last_error)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
       'ready', :attempts, fence, {now},
       created_at, first_error, last_error
FROM oncekey_dead_letter WHERE id = :id AND kind = :kind AND (:died_at IS NULL OR died_at = :died_at)
{written(id)};

-- name: drop_dead_letter
-- Delete one dead letter.
DELETE FROM oncekey_dead_letter WHERE id = :id AND kind = :kind AND (:died_at IS NULL OR died_at = :died_at)
{written(id)};

-- name: find_dead_letter
-- Read one dead letter.
SELECT dead.* FROM oncekey_dead_letter AS dead WHERE dead.id = :id;

-- name: dead_letters
-- List dead letters, oldest first.
SELECT dead.* FROM oncekey_dead_letter AS dead
WHERE (dead.died_at, dead.id) > (:died_at, :id)
ORDER BY dead.died_at, dead.id
LIMIT :limit;
