-- Listings for operators. Every list walks one index from a position and reads at most :looked of its entries: those
-- that do not match are skipped, and the edge is the position where the next page begins. Lists return the clock even if
-- they are empty, and no responses: bodies may be large. The walks differ in their state and their order: by the
-- beginning of a record, or by its expiry. The state is written into the statement and is not a parameter, because
-- otherwise the planner could not use the index of that state.

-- part: walked
entry.scope, entry.key, entry.created_at, entry.expires_at, entry.operation, entry.effects, entry.last_error,
            entry.lease_until, entry.incarnation

-- part: fitting
(:within::text IS NULL OR starts_with(seen.scope, :within::text))
          AND (:beginning::text IS NULL OR starts_with(seen.key, :beginning::text))
          AND (:operation::text IS NULL OR seen.operation = :operation::text)
          AND (:effects::text IS NULL OR seen.effects = :effects::text)
          AND (:incarnation::uuid IS NULL OR seen.incarnation = :incarnation::uuid)
          AND (:error::text IS NULL OR seen.last_error = :error::text)
          AND (:older::bigint = 0 OR seen.created_at <= (SELECT clock.now FROM clock) - :older::bigint)
          AND (:younger::bigint = 0 OR seen.created_at > (SELECT clock.now FROM clock) - :younger::bigint)
          AND (NOT :stale::boolean OR seen.lease_until <= (SELECT clock.now FROM clock))

-- part: shown
{all_but_content}, record.memo, record.response_status,
    '[]' AS response_headers, NULL::bytea AS response_body, 1 AS response_schema, NULL::bytea AS request

-- part: walk(at; fits; side; direction)
WITH {clock}
SELECT clock.now, edge.edge_at, edge.edge_scope, edge.edge_key, record.*
FROM clock
LEFT JOIN (
    SELECT entry.{at} AS edge_at, entry.scope AS edge_scope, entry.key AS edge_key
    FROM oncekey.record AS entry
    WHERE {fits}
      AND (entry.{at}, entry.scope, entry.key) {side} (:place_at::bigint, :place_scope::text, :place_key::text)
    ORDER BY entry.{at} {direction}, entry.scope {direction}, entry.key {direction}
    OFFSET :looked::bigint - 1 LIMIT 1) AS edge ON true
LEFT JOIN (
    SELECT {shown}
    FROM (
        SELECT seen.scope, seen.key
        FROM (
            SELECT {walked}
            FROM oncekey.record AS entry
            WHERE {fits}
              AND (entry.{at}, entry.scope, entry.key) {side} (:place_at::bigint, :place_scope::text, :place_key::text)
            ORDER BY entry.{at} {direction}, entry.scope {direction}, entry.key {direction}
            LIMIT :looked::bigint) AS seen
        WHERE {fitting}
        ORDER BY seen.{at} {direction}, seen.scope {direction}, seen.key {direction}
        LIMIT :limit::bigint) AS page
    JOIN oncekey.whole AS record ON record.scope = page.scope AND record.key = page.key) AS record ON true
ORDER BY record.{at} {direction}, record.scope {direction}, record.key {direction}

-- name: walk_pending
-- List pending records, newest first.
-- Served by record_waiting.
{walk(created_at; entry.state = 'pending'; <; DESC)};

-- name: walk_in_progress
-- List records in progress, newest first.
-- Served by record_running.
{walk(created_at; entry.state = 'in_progress'; <; DESC)};

-- name: walk_failed_retryable
-- List retryable records, newest first.
-- Served by record_waiting.
{walk(created_at; entry.state = 'failed_retryable'; <; DESC)};

-- name: walk_unknown
-- List unknown records, newest first.
-- Served by record_waiting.
{walk(created_at; entry.state = 'unknown'; <; DESC)};

-- name: walk_unknown_oldest
-- List unknown records, oldest first.
-- Served by record_waiting.
{walk(created_at; entry.state = 'unknown'; >; ASC)};

-- name: walk_completed
-- List completed records, those that expire last first.
-- Served by record_expiring.
{walk(expires_at; entry.state = 'completed'; <; DESC)};

-- name: walk_expired
-- List records that are marked as expired, those that expired last first.
-- Served by record_expired.
{walk(expires_at; entry.state = 'expired'; <; DESC)};

-- name: walk_letters
-- List dead letters, oldest first.
-- Served by dead_letter_died.
WITH {clock}
SELECT clock.now, edge.edge_at, edge.edge_id, letter.*
FROM clock
LEFT JOIN (
    SELECT dead.died_at AS edge_at, dead.id AS edge_id
    FROM oncekey.dead_letter AS dead
    WHERE (dead.died_at, dead.id) > (:place_at::bigint, :id::uuid)
    ORDER BY dead.died_at, dead.id
    OFFSET :looked::bigint - 1 LIMIT 1) AS edge ON true
LEFT JOIN (
    SELECT letter.*
    FROM (
        SELECT seen.id
        FROM (
            SELECT dead.id, dead.died_at, dead.scope, dead.aggregatetype, dead.kind, dead.last_error
            FROM oncekey.dead_letter AS dead
            WHERE (dead.died_at, dead.id) > (:place_at::bigint, :id::uuid)
            ORDER BY dead.died_at, dead.id
            LIMIT :looked::bigint) AS seen
        WHERE (:within::text IS NULL OR starts_with(seen.scope, :within::text))
          AND (:topic::text IS NULL OR seen.aggregatetype = :topic::text)
          AND (:kind::text IS NULL OR seen.kind = :kind::text)
          AND (:error::text IS NULL OR strpos(seen.last_error, :error::text) > 0)
          AND (:older::bigint = 0 OR seen.died_at <= (SELECT clock.now FROM clock) - :older::bigint)
          AND (:younger::bigint = 0 OR seen.died_at > (SELECT clock.now FROM clock) - :younger::bigint)
        ORDER BY seen.died_at, seen.id
        LIMIT :limit::bigint) AS page
    JOIN oncekey.dead_letter AS letter ON letter.id = page.id) AS letter ON true
ORDER BY letter.died_at, letter.id;

-- part: tallied(state)
SELECT clock.now, '{state}' AS what, count(*) AS found, min(seen.created_at) AS oldest
FROM clock, LATERAL (
    SELECT entry.created_at FROM oncekey.record AS entry
    WHERE entry.state = '{state}'
    ORDER BY entry.created_at, entry.scope, entry.key LIMIT :most::bigint) AS seen
GROUP BY clock.now;

-- name: tally
-- Count unfinished records, due parcels and dead letters, each up to :most, from the oldest.
WITH {clock}
{tallied(pending)}
UNION ALL
{tallied(in_progress)}
UNION ALL
{tallied(failed_retryable)}
UNION ALL
{tallied(unknown)}
UNION ALL
SELECT clock.now, 'stuck', count(*), min(seen.lease_until)
FROM clock, LATERAL (
    SELECT entry.lease_until FROM oncekey.record AS entry
    WHERE entry.state = 'in_progress'
    ORDER BY entry.created_at, entry.scope, entry.key LIMIT :most::bigint) AS seen
WHERE seen.lease_until <= clock.now
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'due', count(*), min(seen.due_at)
FROM clock, LATERAL (
    SELECT parcel.due_at FROM oncekey.outbox AS parcel
    WHERE parcel.due_at <= clock.now
    ORDER BY parcel.due_at, parcel.place LIMIT :most::bigint) AS seen
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'dead', count(*), min(seen.died_at)
FROM clock, LATERAL (
    SELECT letter.died_at FROM oncekey.dead_letter AS letter
    ORDER BY letter.died_at, letter.id LIMIT :most::bigint) AS seen
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'now', 0, NULL FROM clock;

-- name: ended
-- Read how the last requests ended: finished, failed and unknown ones.
SELECT done.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.finished_at AS at, entry.finished_at - entry.last_run_at AS took
    FROM oncekey.record AS entry
    WHERE entry.state = 'completed'
    ORDER BY entry.expires_at DESC, entry.scope DESC, entry.key DESC
    LIMIT :limit::bigint) AS done
UNION ALL
SELECT failed.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.last_run_at, 0
    FROM oncekey.record AS entry
    WHERE entry.state = 'failed_retryable'
    ORDER BY entry.created_at DESC, entry.scope DESC, entry.key DESC
    LIMIT :limit::bigint) AS failed
UNION ALL
SELECT doubted.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.last_run_at, 0
    FROM oncekey.record AS entry
    WHERE entry.state = 'unknown'
    ORDER BY entry.created_at DESC, entry.scope DESC, entry.key DESC
    LIMIT :limit::bigint) AS doubted;

-- name: calls_of_record
-- List the external calls of one incarnation.
SELECT call.* FROM oncekey.call AS call WHERE call.incarnation = :incarnation::uuid ORDER BY call.at, call.phase
LIMIT :limit::bigint;

-- name: evidence_of_key
-- Read all evidence about a downstream key.
-- Served by evidence_open_key and evidence_judged_key.
SELECT evidence.*
FROM (
    SELECT open.* FROM oncekey.evidence AS open WHERE open.verdict IS NULL AND open.downstream_key = :downstream_key::text
    UNION ALL
    SELECT judged.* FROM oncekey.evidence AS judged WHERE judged.verdict IS NOT NULL AND judged.downstream_key = :downstream_key::text
) AS evidence
ORDER BY evidence.id LIMIT :limit::bigint;

-- name: evidence_of_provider
-- Read all evidence about a provider's id.
-- Served by evidence_open_provider and evidence_judged_provider.
SELECT evidence.*
FROM (
    SELECT open.* FROM oncekey.evidence AS open WHERE open.verdict IS NULL AND open.provider_id = :provider_id::text
    UNION ALL
    SELECT judged.* FROM oncekey.evidence AS judged WHERE judged.verdict IS NOT NULL AND judged.provider_id = :provider_id::text
) AS evidence
ORDER BY evidence.id LIMIT :limit::bigint;

-- name: parcels_in_full
-- Read the parcels of one incarnation with their payloads, dead letters included.
SELECT parcel.id, parcel.kind, parcel.aggregatetype AS topic, parcel.payload, parcel.downstream_key, parcel.attempts,
       parcel.created_at, parcel.due_at, parcel.lease_until, parcel.first_error, parcel.last_error, NULL::bigint AS died_at
FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :incarnation::uuid
UNION ALL
SELECT letter.id, letter.kind, letter.aggregatetype, letter.payload, letter.downstream_key, letter.attempts,
       letter.created_at, NULL, NULL, letter.first_error, letter.last_error, letter.died_at
FROM oncekey.dead_letter AS letter
WHERE letter.incarnation = :incarnation::uuid
LIMIT :limit::bigint;

-- name: latest_notes
-- List audit lines, newest first.
SELECT seen.*
FROM (
    SELECT line.* FROM oncekey.audit AS line WHERE line.id < :before::bigint ORDER BY line.id DESC
    LIMIT :looked::bigint) AS seen
WHERE :actor::text IS NULL OR seen.actor = :actor::text
ORDER BY seen.id DESC
LIMIT :limit::bigint;

-- name: notes_edge
-- Find the audit line at which the next page of `latest_notes` begins.
SELECT line.id FROM oncekey.audit AS line WHERE line.id < :before::bigint ORDER BY line.id DESC
OFFSET :looked::bigint - 1 LIMIT 1;
