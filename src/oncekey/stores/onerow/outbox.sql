-- The outbox. A write about a parcel proves its id and its fence. `due_at` is when a worker may claim a parcel next: when it
-- is to be tried, or, while it is held, when its lease runs out.

-- name: held_by
SELECT {now} AS now, parcel.* FROM oncekey_outbox AS parcel
WHERE parcel.owner = :owner AND parcel.state = 'held';

-- name: find_parcel
SELECT {now} AS now, parcel.*
FROM oncekey_outbox AS parcel WHERE parcel.id = :id;

-- name: again
UPDATE oncekey_outbox
SET state = 'ready', owner = NULL, lease_until = NULL,
    due_at = {now} + :after,
    attempts = attempts - :spared, first_error = COALESCE(first_error, :error), last_error = :error
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{giving_parcel};

-- name: bury
INSERT INTO oncekey_dead_letter (
    id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
    attempts, fence, created_at, first_error, last_error, died_at)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
       attempts, fence, created_at, COALESCE(first_error, :error), :error,
       {now}
FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{told(id)};

-- name: drop_parcel
DELETE FROM oncekey_outbox
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{told(id)};

-- name: hold_record
SELECT {now} AS now, record.*
FROM oncekey_record AS record WHERE record.scope = :scope AND record.`key` = :key
{locked};

-- name: hold_parcel
SELECT {now} AS now, parcel.*
FROM oncekey_outbox AS parcel
WHERE parcel.id = :id AND parcel.fence = :parcel_fence AND parcel.state = 'held'
{locked};

-- name: extend_parcel
UPDATE oncekey_outbox
SET lease_until = {greatest}(lease_until, {now} + :lease),
    due_at = {greatest}(lease_until, {now} + :lease)
WHERE id = :id AND fence = :parcel_fence AND state = 'held'
{giving_parcel};

-- name: take_up
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
UPDATE oncekey_record
SET state = 'in_progress', version = version + 1, memo = :memo, recovery_point = :recovery_point, intent = NULL,
    owner = :owner, lease_until = NULL, last_error = NULL, reconcile_after = NULL
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state IN ('in_progress', 'unknown', 'pending') AND memo IS NULL
{giving};

-- name: pend
UPDATE oncekey_record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = :error,
    intent = CASE WHEN :unsent THEN NULL ELSE intent END
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND effects = 'outbox' AND state = 'in_progress'
{giving};

-- name: park_record
{doubted}
  AND effects = 'outbox' AND state IN ('pending', 'in_progress')
{giving};

-- name: retake_parcel
UPDATE oncekey_outbox
SET state = 'held', fence = fence + 1, owner = :owner,
    lease_until = {now} + :lease,
    due_at = {now} + :lease
WHERE id = :id AND incarnation = :incarnation
{giving_parcel};

-- name: bring_back
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at, first_error, last_error)
SELECT id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
       'ready', :attempts, fence, {now},
       created_at, first_error, last_error
FROM oncekey_dead_letter WHERE id = :id AND kind = :kind
{told(id)};

-- name: drop_dead_letter
DELETE FROM oncekey_dead_letter WHERE id = :id AND kind = :kind
{told(id)};

-- name: find_dead_letter
SELECT dead.* FROM oncekey_dead_letter AS dead WHERE dead.id = :id;

-- name: dead_letters
SELECT dead.* FROM oncekey_dead_letter AS dead
WHERE (dead.died_at, dead.id) > (:died_at, :id)
ORDER BY dead.died_at, dead.id
LIMIT :limit;
