-- The provider's ledger in SQLite: one row per charge. `entry` is the order in which they were made.

-- name: create_table
-- Create the provider's table of charges.
CREATE TABLE IF NOT EXISTS charge (
    entry          INTEGER PRIMARY KEY,
    id             TEXT    NOT NULL UNIQUE,
    downstream_key TEXT,
    deduplicated   INTEGER NOT NULL CHECK (deduplicated IN (0, 1)),
    amount_cents   INTEGER NOT NULL CHECK (amount_cents > 0),
    currency       TEXT    NOT NULL,
    customer_id    TEXT    NOT NULL,
    at             TEXT    NOT NULL
) STRICT;

-- name: create_once
-- Allow one charge per downstream key, if the provider deduplicates.
-- The last line of defence where two providers share a file: one charge per key that counts.
CREATE UNIQUE INDEX IF NOT EXISTS charge_once ON charge (downstream_key) WHERE deduplicated = 1;

-- name: create_look_up
-- Index the charges by downstream key.
CREATE INDEX IF NOT EXISTS charge_key ON charge (downstream_key);

-- name: insert_charge
-- Insert a charge.
INSERT INTO charge (id, downstream_key, deduplicated, amount_cents, currency, customer_id, at)
VALUES (:id, :downstream_key, :deduplicated, :amount_cents, :currency, :customer_id, :at);

-- name: find_same
-- Find the charge that a repeated call with this key gets.
SELECT id, downstream_key, amount_cents, currency, customer_id, at
FROM charge
WHERE downstream_key = :downstream_key AND deduplicated = 1;

-- name: by_key
-- List all charges with this key, deduplicated or not.
SELECT id, downstream_key, amount_cents, currency, customer_id, at
FROM charge
WHERE downstream_key = :downstream_key
ORDER BY entry;

-- name: all
-- List all charges in order.
SELECT id, downstream_key, amount_cents, currency, customer_id, at
FROM charge
ORDER BY entry;
