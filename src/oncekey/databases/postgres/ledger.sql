-- How PostgreSQL records its migrations. The lock's number is arbitrary and reserved for oncekey; it ends with the
-- transaction. A migration that waits for a lock on a table blocks every statement behind it, so it waits only five
-- seconds.

-- name: lock
-- Lock the migrations, so that one process at a time applies them.
SELECT pg_advisory_xact_lock(6012904419870137), set_config('lock_timeout', '5s', true);

-- name: table
-- Create the table of applied migrations.
CREATE SCHEMA IF NOT EXISTS oncekey;

CREATE TABLE IF NOT EXISTS oncekey.migration (
    number     integer  NOT NULL PRIMARY KEY,
    phase      text     NOT NULL,
    name       text     NOT NULL,
    checksum   text     NOT NULL,  -- SHA-256 of the statements; oncekey rejects a store with other statements
    applied_at bigint   NOT NULL,
    CONSTRAINT phase_known CHECK (phase IN ('pre', 'post'))
);

-- name: applied
-- List the applied migrations.
SELECT number, phase, name, checksum, applied_at FROM oncekey.migration ORDER BY number;

-- name: record
-- Insert a migration that was applied.
INSERT INTO oncekey.migration (number, phase, name, checksum, applied_at)
VALUES (:number::integer, :phase, :name, :checksum, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
