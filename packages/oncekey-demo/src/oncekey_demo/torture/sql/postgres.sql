-- The data of a torture run in PostgreSQL, in a separate schema: business rows, deliveries, and a log of the records.

-- name: drop_trigger
-- Drop the trigger that logs the records, if a run left it.
DROP TRIGGER IF EXISTS oncekey_torture ON oncekey.record;

-- name: drop_schema
-- Drop the schema of a former run.
DROP SCHEMA IF EXISTS oncekey_torture CASCADE;

-- name: create_schema
-- Create the schema of this run.
CREATE SCHEMA oncekey_torture;

-- name: create_rows
-- Create the table of business rows.
-- Without unique keys, so that duplicate writes are visible.
CREATE TABLE oncekey_torture.business (
    id     text   NOT NULL PRIMARY KEY,
    route  text   NOT NULL,
    key    text   NOT NULL,
    wanted text   NOT NULL,
    at     bigint NOT NULL
);

-- name: create_deliveries
-- Create the table of delivered messages.
CREATE TABLE oncekey_torture.delivery (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key            text   NOT NULL,
    downstream_key text   NOT NULL
);

-- name: create_log
-- Create the table that logs every change of a record.
CREATE TABLE oncekey_torture.log (
    place       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope       text   NOT NULL,
    key         text   NOT NULL,
    state       text,
    incarnation text   NOT NULL,
    fence       bigint NOT NULL,
    version     bigint NOT NULL,
    fingerprint text   NOT NULL,
    at          bigint NOT NULL
);

-- name: create_logging
-- Create the function that writes the log.
-- The writer of a row locks it, so the positions of one key are in the order of its commits.
CREATE FUNCTION oncekey_torture.keep() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    one oncekey.record := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO oncekey_torture.log (scope, key, state, incarnation, fence, version, fingerprint, at)
    VALUES (one.scope, one.key, CASE WHEN TG_OP = 'DELETE' THEN NULL ELSE one.state END, one.incarnation::text,
            one.fence, one.version, one.fingerprint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    RETURN NULL;
END
$$;

-- name: create_trigger
-- Log every new, changed or deleted record.
CREATE TRIGGER oncekey_torture AFTER INSERT OR UPDATE OR DELETE ON oncekey.record
FOR EACH ROW EXECUTE FUNCTION oncekey_torture.keep();

-- name: foreign
-- Count the records and parcels that are in the store before the run.
SELECT (SELECT count(*) FROM oncekey.record) AS records, (SELECT count(*) FROM oncekey.outbox) AS parcels;

-- name: add_row
-- Insert a business row.
INSERT INTO oncekey_torture.business (id, route, key, wanted, at) VALUES (:id, :route, :key, :wanted, :at::bigint);

-- name: add_delivery
-- Insert a delivered message.
INSERT INTO oncekey_torture.delivery (key, downstream_key) VALUES (:key, :downstream_key);

-- name: rows
-- List the business rows in order.
SELECT id, route, key, wanted, at FROM oncekey_torture.business ORDER BY at, id;

-- name: deliveries
-- Count how often each message was delivered.
SELECT key, downstream_key, count(*) AS times FROM oncekey_torture.delivery GROUP BY key, downstream_key;

-- name: log
-- Read the log of one scope in order.
SELECT place, scope, key, state, incarnation, fence, version, fingerprint, at
FROM oncekey_torture.log
WHERE scope = :scope
ORDER BY place;

-- name: records
-- Read the records of one scope.
SELECT key, incarnation::text AS incarnation, effects, state, fingerprint, attempts, recovery_point,
       response_status, response_body, last_error, reconcile_after
FROM oncekey.whole
WHERE scope = :scope
ORDER BY key;

-- name: parcels
-- Read the parcels of one scope.
SELECT key, kind, aggregatetype AS topic, state, attempts, last_error
FROM oncekey.outbox
WHERE scope = :scope
ORDER BY place;

-- name: dead_letters
-- Read the dead letters of one scope.
SELECT key, kind, aggregatetype AS topic, last_error FROM oncekey.dead_letter WHERE scope = :scope ORDER BY died_at;

-- name: unfinished
-- List the work that workers have to finish without a client: PHASED requests that have started, and parcels.
SELECT record.key, record.effects || ' ' || record.state AS what
FROM oncekey.record
WHERE record.scope = :scope AND record.effects = 'phased'
  AND record.state IN ('in_progress', 'failed_retryable') AND record.recovery_point <> 'started'
UNION ALL
SELECT parcel.key, 'a parcel of ' || parcel.aggregatetype
FROM oncekey.outbox AS parcel
WHERE parcel.scope = :scope;

-- name: clear_parcels
-- Delete the parcels of one scope.
DELETE FROM oncekey.outbox WHERE scope = :scope;

-- name: clear_dead_letters
-- Delete the dead letters of one scope.
DELETE FROM oncekey.dead_letter WHERE scope = :scope;

-- name: clear_records
-- Delete the records of one scope.
DELETE FROM oncekey.record WHERE scope = :scope;
