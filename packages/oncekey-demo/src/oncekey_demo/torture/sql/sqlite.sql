-- The data of a torture run in SQLite, in separate tables: business rows, deliveries, and a log of the records.

-- name: drop_insert_trigger
-- Drop the trigger that logs new records, if a run left it.
DROP TRIGGER IF EXISTS oncekey_torture_insert;

-- name: drop_update_trigger
-- Drop the trigger that logs changed records, if a run left it.
DROP TRIGGER IF EXISTS oncekey_torture_update;

-- name: drop_delete_trigger
-- Drop the trigger that logs deleted records, if a run left it.
DROP TRIGGER IF EXISTS oncekey_torture_delete;

-- name: drop_rows
-- Drop the business rows of a former run.
DROP TABLE IF EXISTS oncekey_torture_business;

-- name: drop_deliveries
-- Drop the deliveries of a former run.
DROP TABLE IF EXISTS oncekey_torture_delivery;

-- name: drop_log
-- Drop the log of a former run.
DROP TABLE IF EXISTS oncekey_torture_log;

-- name: create_rows
-- Create the table of business rows.
-- Without unique keys, so that duplicate writes are visible.
CREATE TABLE oncekey_torture_business (
    id     TEXT    NOT NULL PRIMARY KEY,
    route  TEXT    NOT NULL,
    key    TEXT    NOT NULL,
    wanted TEXT    NOT NULL,
    at     INTEGER NOT NULL
) STRICT;

-- name: create_deliveries
-- Create the table of delivered messages.
CREATE TABLE oncekey_torture_delivery (
    id             INTEGER PRIMARY KEY,
    key            TEXT NOT NULL,
    downstream_key TEXT NOT NULL
) STRICT;

-- name: create_log
-- Create the table that logs every change of a record.
CREATE TABLE oncekey_torture_log (
    place       INTEGER PRIMARY KEY,
    scope       TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    state       TEXT,
    incarnation TEXT    NOT NULL,
    fence       INTEGER NOT NULL,
    version     INTEGER NOT NULL,
    fingerprint TEXT    NOT NULL,
    at          INTEGER NOT NULL
) STRICT;

-- name: create_insert_trigger
-- Log every new record.
-- SQLite's clock has milliseconds: one is added, so that no write seems to precede its request.
CREATE TRIGGER oncekey_torture_insert AFTER INSERT ON oncekey_record BEGIN
    INSERT INTO oncekey_torture_log (scope, key, state, incarnation, fence, version, fingerprint, at)
    SELECT NEW.scope, NEW.key, NEW.state, NEW.incarnation, NEW.fence, NEW.version, NEW.fingerprint, now + 1000
    FROM oncekey_clock;
END;

-- name: create_update_trigger
-- Log every changed record.
CREATE TRIGGER oncekey_torture_update AFTER UPDATE ON oncekey_record BEGIN
    INSERT INTO oncekey_torture_log (scope, key, state, incarnation, fence, version, fingerprint, at)
    SELECT NEW.scope, NEW.key, NEW.state, NEW.incarnation, NEW.fence, NEW.version, NEW.fingerprint, now + 1000
    FROM oncekey_clock;
END;

-- name: create_delete_trigger
-- Log every deleted record.
CREATE TRIGGER oncekey_torture_delete AFTER DELETE ON oncekey_record BEGIN
    INSERT INTO oncekey_torture_log (scope, key, state, incarnation, fence, version, fingerprint, at)
    SELECT OLD.scope, OLD.key, NULL, OLD.incarnation, OLD.fence, OLD.version, OLD.fingerprint, now + 1000
    FROM oncekey_clock;
END;

-- name: foreign
-- Count the records and parcels that are in the store before the run.
SELECT (SELECT count(*) FROM oncekey_record) AS records, (SELECT count(*) FROM oncekey_outbox) AS parcels;

-- name: add_row
-- Insert a business row.
INSERT INTO oncekey_torture_business (id, route, key, wanted, at) VALUES (:id, :route, :key, :wanted, :at);

-- name: add_delivery
-- Insert a delivered message.
INSERT INTO oncekey_torture_delivery (key, downstream_key) VALUES (:key, :downstream_key);

-- name: rows
-- List the business rows in order.
SELECT id, route, key, wanted, at FROM oncekey_torture_business ORDER BY at, id;

-- name: deliveries
-- Count how often each message was delivered.
SELECT key, downstream_key, count(*) AS times FROM oncekey_torture_delivery GROUP BY key, downstream_key;

-- name: log
-- Read the log of one scope in order.
SELECT place, scope, key, state, incarnation, fence, version, fingerprint, at
FROM oncekey_torture_log
WHERE scope = :scope
ORDER BY place;

-- name: records
-- Read the records of one scope.
SELECT key, incarnation, effects, state, fingerprint, attempts, recovery_point,
       response_status, response_body, last_error, reconcile_after
FROM oncekey_record
WHERE scope = :scope
ORDER BY key;

-- name: parcels
-- Read the parcels of one scope.
SELECT key, kind, aggregatetype AS topic, state, attempts, last_error
FROM oncekey_outbox
WHERE scope = :scope
ORDER BY place;

-- name: dead_letters
-- Read the dead letters of one scope.
SELECT key, kind, aggregatetype AS topic, last_error FROM oncekey_dead_letter WHERE scope = :scope ORDER BY died_at;

-- name: unfinished
-- List the work that workers have to finish without a client: PHASED requests that have started, and parcels.
SELECT record.key, record.effects || ' ' || record.state AS what
FROM oncekey_record AS record
WHERE record.scope = :scope AND record.effects = 'phased'
  AND record.state IN ('in_progress', 'failed_retryable') AND record.recovery_point <> 'started'
UNION ALL
SELECT parcel.key, 'a parcel of ' || parcel.aggregatetype
FROM oncekey_outbox AS parcel
WHERE parcel.scope = :scope;

-- name: clear_parcels
-- Delete the parcels of one scope.
DELETE FROM oncekey_outbox WHERE scope = :scope;

-- name: clear_dead_letters
-- Delete the dead letters of one scope.
DELETE FROM oncekey_dead_letter WHERE scope = :scope;

-- name: clear_records
-- Delete the records of one scope.
DELETE FROM oncekey_record WHERE scope = :scope;
