-- How MariaDB records its migrations. It commits before and after each statement that changes a table, so a migration
-- is not atomic: every statement of one may be run again, and a migration that was interrupted is run again from its
-- start. The lock's name is per database; it belongs to the session, so it has to be released.

-- name: lock
-- Lock the migrations, so that one process at a time applies them.
SELECT GET_LOCK(CONCAT('oncekey_migration_', LEFT(SHA2(DATABASE(), 256), 32)), 60) AS got;

-- name: unlock
-- Release the lock of the migrations.
SELECT RELEASE_LOCK(CONCAT('oncekey_migration_', LEFT(SHA2(DATABASE(), 256), 32))) AS given_back;

-- name: table
-- Create the table of applied migrations.
CREATE TABLE IF NOT EXISTS oncekey_migration (
    number     INTEGER       NOT NULL PRIMARY KEY,
    phase      VARBINARY(8)  NOT NULL,
    name       VARBINARY(64) NOT NULL,
    checksum   VARBINARY(64) NOT NULL,  -- SHA-256 of the statements; oncekey rejects a store with other statements
    applied_at BIGINT        NOT NULL,
    CONSTRAINT oncekey_migration_phase_known CHECK (phase IN ('pre', 'post'))
) ENGINE = InnoDB;

-- name: applied
-- List the applied migrations.
SELECT number, phase, name, checksum, applied_at FROM oncekey_migration ORDER BY number;

-- name: record
-- Insert a migration that was applied.
INSERT INTO oncekey_migration (number, phase, name, checksum, applied_at)
VALUES (:number, :phase, :name, :checksum, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)));
