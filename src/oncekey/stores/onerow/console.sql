-- Listings for operators. Every list walks one index from a position and reads at most :looked of its entries: those that
-- do not match are skipped, and the edge is the position where the next page begins. Lists return the clock even if they
-- are empty, and no responses: bodies may be large.
-- SQLite uses a partial index only if the statement contains the words of its condition.
--
-- The walks differ in their state and their order: by the beginning of a record, or by its expiry. The state is written
-- into the statement and is not a parameter, because otherwise the planner could not use the index of that state.

-- part: console_clock
clock AS (SELECT {now} AS now)

-- part: walked
entry.scope, entry.`key`, entry.created_at, entry.expires_at, entry.operation, entry.effects, entry.last_error,
            entry.lease_until, entry.incarnation

-- part: fitting
(:within IS NULL OR substr(seen.scope, 1, length(:within)) = :within)
          AND (:beginning IS NULL OR substr(seen.`key`, 1, length(:beginning)) = :beginning)
          AND (:operation IS NULL OR seen.operation = :operation)
          AND (:effects IS NULL OR seen.effects = :effects)
          AND (:incarnation IS NULL OR seen.incarnation = :incarnation)
          AND (:error IS NULL OR seen.last_error = :error)
          AND (:older = 0 OR seen.created_at <= (SELECT clock.now FROM clock) - :older)
          AND (:younger = 0 OR seen.created_at > (SELECT clock.now FROM clock) - :younger)
          AND (NOT :stale OR seen.lease_until <= (SELECT clock.now FROM clock))

-- part: shown
{all_but_content}, record.memo, record.response_status,
    '[]' AS response_headers, NULL AS response_body, 1 AS response_schema, NULL AS request

-- part: walk(at; fits; side; direction)
WITH {console_clock}
SELECT clock.now, edge.edge_at, edge.edge_scope, edge.edge_key, record.*
FROM clock
LEFT JOIN (
    SELECT entry.{at} AS edge_at, entry.scope AS edge_scope, entry.`key` AS edge_key
    FROM oncekey_record AS entry
    WHERE {fits}
      AND (entry.{at}, entry.scope, entry.`key`) {side} (:place_at, :place_scope, :place_key)
    ORDER BY entry.{at} {direction}, entry.scope {direction}, entry.`key` {direction}
    LIMIT 1 OFFSET :skipped) AS edge ON true
LEFT JOIN (
    SELECT {shown}
    FROM (
        SELECT seen.scope, seen.`key`
        FROM (
            SELECT {walked}
            FROM oncekey_record AS entry
            WHERE {fits}
              AND (entry.{at}, entry.scope, entry.`key`) {side} (:place_at, :place_scope, :place_key)
            ORDER BY entry.{at} {direction}, entry.scope {direction}, entry.`key` {direction}
            LIMIT :looked) AS seen
        WHERE {fitting}
        ORDER BY seen.{at} {direction}, seen.scope {direction}, seen.`key` {direction}
        LIMIT :limit) AS page
    JOIN oncekey_record AS record ON record.scope = page.scope AND record.`key` = page.`key`) AS record ON true
ORDER BY record.{at} {direction}, record.scope {direction}, record.`key` {direction}

-- name: walk_pending
-- List pending records, newest first.
-- Served by oncekey_record_waiting.
{walk(created_at; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'pending'; <; DESC)};

-- name: walk_in_progress
-- List records in progress, newest first.
-- Served by oncekey_record_running.
{walk(created_at; entry.state = 'in_progress'; <; DESC)};

-- name: walk_failed_retryable
-- List retryable records, newest first.
-- Served by oncekey_record_waiting.
{walk(created_at; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'failed_retryable'; <; DESC)};

-- name: walk_unknown
-- List unknown records, newest first.
-- Served by oncekey_record_waiting.
{walk(created_at; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'unknown'; <; DESC)};

-- name: walk_unknown_oldest
-- List unknown records, oldest first.
-- Served by oncekey_record_waiting.
{walk(created_at; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'unknown'; >; ASC)};

-- name: walk_completed
-- List completed records, those that expire last first.
-- Served by oncekey_record_expiring.
{walk(expires_at; entry.state IN ('completed', 'failed_retryable', 'pending') AND entry.state = 'completed'; <; DESC)};

-- name: walk_expired
-- List records that are marked as expired, those that expired last first.
-- Served by oncekey_record_expired.
{walk(expires_at; entry.state = 'expired'; <; DESC)};

-- name: walk_letters
-- List dead letters, oldest first.
-- Served by oncekey_dead_letter_died.
WITH {console_clock}
SELECT clock.now, edge.edge_at, edge.edge_id, letter.*
FROM clock
LEFT JOIN (
    SELECT dead.died_at AS edge_at, dead.id AS edge_id
    FROM oncekey_dead_letter AS dead
    WHERE (dead.died_at, dead.id) > (:place_at, :id)
    ORDER BY dead.died_at, dead.id
    LIMIT 1 OFFSET :skipped) AS edge ON true
LEFT JOIN (
    SELECT letter.*
    FROM (
        SELECT seen.id
        FROM (
            SELECT dead.id, dead.died_at, dead.scope, dead.aggregatetype, dead.kind, dead.last_error
            FROM oncekey_dead_letter AS dead
            WHERE (dead.died_at, dead.id) > (:place_at, :id)
            ORDER BY dead.died_at, dead.id
            LIMIT :looked) AS seen
        WHERE (:within IS NULL OR substr(seen.scope, 1, length(:within)) = :within)
          AND (:topic IS NULL OR seen.aggregatetype = :topic)
          AND (:kind IS NULL OR seen.kind = :kind)
          AND (:error IS NULL OR instr(seen.last_error, :error) > 0)
          AND (:older = 0 OR seen.died_at <= (SELECT clock.now FROM clock) - :older)
          AND (:younger = 0 OR seen.died_at > (SELECT clock.now FROM clock) - :younger)
        ORDER BY seen.died_at, seen.id
        LIMIT :limit) AS page
    JOIN oncekey_dead_letter AS letter ON letter.id = page.id) AS letter ON true
ORDER BY letter.died_at, letter.id;

-- part: tallied(state; fits)
SELECT clock.now, '{state}' AS what, count(*) AS found, min(seen.created_at) AS oldest
FROM clock, (
    SELECT entry.created_at FROM oncekey_record AS entry
    WHERE {fits}
    ORDER BY entry.created_at, entry.scope, entry.`key` LIMIT :most) AS seen
GROUP BY clock.now;

-- name: tally
-- Count unfinished records, due parcels and dead letters, each up to :most, from the oldest.
WITH {console_clock}
{tallied(pending; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'pending')}
UNION ALL
{tallied(in_progress; entry.state = 'in_progress')}
UNION ALL
{tallied(failed_retryable; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'failed_retryable')}
UNION ALL
{tallied(unknown; entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'unknown')}
UNION ALL
SELECT clock.now, 'stuck', count(*), min(seen.lease_until)
FROM clock, (
    SELECT entry.lease_until FROM oncekey_record AS entry
    WHERE entry.state = 'in_progress'
    ORDER BY entry.created_at, entry.scope, entry.`key` LIMIT :most) AS seen
WHERE seen.lease_until <= clock.now
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'due', count(*), min(seen.due_at)
FROM clock, (
    SELECT parcel.due_at FROM oncekey_outbox AS parcel
    WHERE parcel.due_at <= {now}
    ORDER BY parcel.due_at, parcel.place LIMIT :most) AS seen
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'dead', count(*), min(seen.died_at)
FROM clock, (
    SELECT letter.died_at FROM oncekey_dead_letter AS letter
    ORDER BY letter.died_at, letter.id LIMIT :most) AS seen
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'now', 0, NULL FROM clock;

-- name: ended
-- Read how the last requests ended: finished, failed and unknown ones.
SELECT done.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.finished_at AS at, entry.finished_at - entry.last_run_at AS took
    FROM oncekey_record AS entry
    WHERE entry.state IN ('completed', 'failed_retryable', 'pending') AND entry.state = 'completed'
    ORDER BY entry.expires_at DESC, entry.scope DESC, entry.`key` DESC
    LIMIT :limit) AS done
UNION ALL
SELECT failed.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.last_run_at, 0
    FROM oncekey_record AS entry
    WHERE entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'failed_retryable'
    ORDER BY entry.created_at DESC, entry.scope DESC, entry.`key` DESC
    LIMIT :limit) AS failed
UNION ALL
SELECT doubted.*
FROM (
    SELECT entry.state, entry.outcome, entry.operation, entry.last_run_at, 0
    FROM oncekey_record AS entry
    WHERE entry.state IN ('pending', 'failed_retryable', 'unknown') AND entry.state = 'unknown'
    ORDER BY entry.created_at DESC, entry.scope DESC, entry.`key` DESC
    LIMIT :limit) AS doubted;

-- name: calls_of_record
-- List the external calls of one incarnation.
SELECT called.* FROM oncekey_call AS called WHERE called.incarnation = :incarnation ORDER BY called.at, called.phase
LIMIT :limit;

-- name: evidence_of_key
-- Read all evidence about a downstream key.
-- Served by oncekey_evidence_open_key and oncekey_evidence_judged_key.
SELECT evidence.*
FROM (
    SELECT open.* FROM oncekey_evidence AS open WHERE open.verdict IS NULL AND open.downstream_key = :downstream_key
    UNION ALL
    SELECT judged.* FROM oncekey_evidence AS judged WHERE judged.verdict IS NOT NULL AND judged.downstream_key = :downstream_key
) AS evidence
ORDER BY evidence.id LIMIT :limit;

-- name: evidence_of_provider
-- Read all evidence about a provider's id.
-- Served by oncekey_evidence_open_provider and oncekey_evidence_judged_provider.
SELECT evidence.*
FROM (
    SELECT open.* FROM oncekey_evidence AS open WHERE open.verdict IS NULL AND open.provider_id = :provider_id
    UNION ALL
    SELECT judged.* FROM oncekey_evidence AS judged WHERE judged.verdict IS NOT NULL AND judged.provider_id = :provider_id
) AS evidence
ORDER BY evidence.id LIMIT :limit;

-- name: parcels_in_full
-- Read the parcels of one incarnation with their payloads, dead letters included.
SELECT parcel.id, parcel.kind, parcel.aggregatetype AS topic, parcel.payload, parcel.downstream_key, parcel.attempts,
       parcel.created_at, parcel.due_at, parcel.lease_until, parcel.first_error, parcel.last_error, NULL AS died_at
FROM oncekey_outbox AS parcel
WHERE parcel.incarnation = :incarnation
UNION ALL
SELECT letter.id, letter.kind, letter.aggregatetype, letter.payload, letter.downstream_key, letter.attempts,
       letter.created_at, NULL, NULL, letter.first_error, letter.last_error, letter.died_at
FROM oncekey_dead_letter AS letter
WHERE letter.incarnation = :incarnation
LIMIT :limit;

-- name: latest_notes
-- List audit lines, newest first.
SELECT seen.*
FROM (
    SELECT line.* FROM oncekey_audit AS line WHERE line.id < :before ORDER BY line.id DESC
    LIMIT :looked) AS seen
WHERE :actor IS NULL OR seen.actor = :actor
ORDER BY seen.id DESC
LIMIT :limit;

-- name: notes_edge
-- Find the audit line at which the next page of `latest_notes` begins.
SELECT line.id FROM oncekey_audit AS line WHERE line.id < :before ORDER BY line.id DESC
LIMIT 1 OFFSET :skipped;
