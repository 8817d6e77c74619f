-- name: put_parcels
-- Insert the parcels of a handler, in the transaction of its business rows.
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, `key`, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at)
SELECT given.id, given.topic, COALESCE(given.order_by, given.incarnation), given.topic, given.payload, given.kind, given.scope,
       given.name, given.incarnation, given.downstream_key, given.position, given.order_by, 'ready', 0, 0, {now}, {now}
FROM JSON_TABLE(:parcels, '$[*]' COLUMNS (
    id VARCHAR(36) PATH '$.id', topic VARCHAR(512) CHARACTER SET utf8mb4 PATH '$.topic',
    payload LONGTEXT CHARACTER SET utf8mb4 PATH '$.payload', kind VARCHAR(8) PATH '$.kind',
    scope VARCHAR(2000) CHARACTER SET utf8mb4 PATH '$.scope', name VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.key',
    incarnation VARCHAR(36) PATH '$.incarnation',
    downstream_key VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.downstream_key', position INTEGER PATH '$.position',
    order_by VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.order_by')) AS given
ORDER BY given.position;

-- name: due
-- Claim the parcels that a worker delivers next, longest waiting first.
-- At most `careful` of the next parcels are claimed that are a request's own call or were attempted
-- before. A parcel that another worker has locked is skipped, so that no worker waits for another.
-- A scope that begins with a digit has its namespace first.
UPDATE oncekey_outbox AS parcel
JOIN (
    SELECT ranked.place
    FROM (
        SELECT next.place, next.careful,
               ROW_NUMBER() OVER (PARTITION BY next.careful ORDER BY next.due_at, next.place) AS turn
        FROM (
            SELECT found.place, found.due_at, found.kind = 'defer' OR found.attempts > 0 AS careful
            FROM oncekey_outbox AS found
            WHERE found.due_at <= {now}
              AND found.aggregatetype IN (
                  SELECT known.topic COLLATE utf8mb4_bin
                  FROM JSON_TABLE(:topics, '$[*]' COLUMNS (topic VARCHAR(512) CHARACTER SET utf8mb4 PATH '$')) AS known)
              AND (SUBSTR(found.scope, 1, 1) NOT BETWEEN '0' AND '9'
                   OR SUBSTR(found.scope, 1, CHAR_LENGTH(:beginning)) = :beginning)
              AND (found.order_by IS NULL OR NOT EXISTS (
                  SELECT 1 FROM oncekey_outbox AS older
                  WHERE older.order_by = found.order_by AND older.place < found.place))
            ORDER BY found.due_at, found.place
            LIMIT :limit
            FOR UPDATE SKIP LOCKED) AS next) AS ranked
    WHERE NOT ranked.careful OR ranked.turn <= :careful) AS taken ON parcel.place = taken.place
SET parcel.state = 'held', parcel.fence = parcel.fence + 1, parcel.attempts = parcel.attempts + 1, parcel.owner = :owner,
    parcel.lease_until = {now} + :lease, parcel.due_at = {now} + :lease;
SELECT {now} AS now, parcel.* FROM oncekey_outbox AS parcel WHERE parcel.owner = :owner AND parcel.state = 'held';

-- part: held
JSON_TABLE(:held, '$[*]' COLUMNS (id VARCHAR(36) PATH '$.id', fence BIGINT PATH '$.fence')) AS held
STRAIGHT_JOIN oncekey_outbox AS parcel ON parcel.id = CAST(held.id AS BINARY) AND parcel.fence = held.fence
    AND parcel.state = 'held'

-- part: of_parcel
-- MySQL must lock only the parcels, because the list cannot be locked; MariaDB reads this as a comment.
/*!80000 OF parcel */

-- name: sent
-- Delete messages that were delivered.
SELECT parcel.id FROM {held} AND parcel.kind = 'emit' FOR UPDATE {of_parcel};
DELETE parcel FROM {held} AND parcel.kind = 'emit';

-- name: remaining
-- Read which parcels are still in the outbox, after the reply to `sent` was lost.
SELECT parcel.id FROM JSON_TABLE(:held, '$[*]' COLUMNS (id VARCHAR(36) PATH '$.id')) AS held
STRAIGHT_JOIN oncekey_outbox AS parcel ON parcel.id = CAST(held.id AS BINARY);

-- name: hand_back
-- Release parcels that a worker claimed and did not begin; the attempt does not count.
SELECT parcel.id FROM {held} FOR UPDATE {of_parcel};
UPDATE {held}
SET parcel.state = 'ready', parcel.owner = NULL, parcel.lease_until = NULL, parcel.attempts = parcel.attempts - 1,
    parcel.due_at = {now};
