-- How SQLite records its migrations. BEGIN IMMEDIATE admits one migrator at a time.

-- name: table
-- Create the table of applied migrations.
CREATE TABLE IF NOT EXISTS oncekey_migration (
    number     INTEGER  NOT NULL PRIMARY KEY,
    phase      TEXT     NOT NULL,
    name       TEXT     NOT NULL,
    checksum   TEXT     NOT NULL,  -- SHA-256 of the statements; oncekey rejects a store with other statements
    applied_at INTEGER  NOT NULL,
    CONSTRAINT phase_known CHECK (phase IN ('pre', 'post'))
) STRICT;

-- name: applied
-- List the applied migrations.
SELECT number, phase, name, checksum, applied_at FROM oncekey_migration ORDER BY number;

-- name: record
-- Insert a migration that was applied.
INSERT INTO oncekey_migration (number, phase, name, checksum, applied_at)
VALUES (:number, :phase, :name, :checksum, CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000);
