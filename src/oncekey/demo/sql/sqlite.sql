-- The demo's tables in SQLite. The primary key serves every statement: ids grow with time.

-- name: create_orders
-- Create the table of orders.
CREATE TABLE IF NOT EXISTS demo_order (
    tenant      TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    status      TEXT    NOT NULL,
    customer_id TEXT    NOT NULL,
    items       TEXT    NOT NULL CHECK (json_valid(items)),
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;

-- name: create_payments
-- Create the table of payments.
CREATE TABLE IF NOT EXISTS demo_payment (
    tenant       TEXT    NOT NULL,
    id           TEXT    NOT NULL,
    status       TEXT    NOT NULL,
    charge_id    TEXT,
    customer_id  TEXT    NOT NULL,
    amount_cents INTEGER NOT NULL,
    currency     TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;

-- name: create_transfers
-- Create the table of transfers.
CREATE TABLE IF NOT EXISTS demo_transfer (
    tenant       TEXT    NOT NULL,
    id           TEXT    NOT NULL,
    status       TEXT    NOT NULL,
    customer_id  TEXT    NOT NULL,
    amount_cents INTEGER NOT NULL,
    currency     TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;

-- name: create_receipts
-- Create the table of receipts.
CREATE TABLE IF NOT EXISTS demo_receipt (
    tenant     TEXT    NOT NULL,
    payment_id TEXT    NOT NULL,
    sent_at    INTEGER NOT NULL,
    PRIMARY KEY (tenant, payment_id)
) STRICT, WITHOUT ROWID;

-- name: insert_order
-- Insert an order.
INSERT INTO demo_order (tenant, id, status, customer_id, items, created_at)
VALUES (:tenant, :id, :status, :customer_id, :items, :created_at);

-- name: newest_orders
-- List a tenant's orders, newest first.
SELECT id, status, customer_id, items, created_at
FROM demo_order
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: find_order
-- Read one order.
SELECT id, status, customer_id, items, created_at
FROM demo_order
WHERE tenant = :tenant AND id = :id;

-- name: insert_payment
-- Insert a payment.
INSERT INTO demo_payment (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id, :status, :customer_id, :amount_cents, :currency, :created_at);

-- name: end_payment
-- Store how a payment ended.
UPDATE demo_payment SET status = :status, charge_id = :charge_id WHERE tenant = :tenant AND id = :id;

-- name: newest_payments
-- List a tenant's payments, newest first.
SELECT id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: find_payment
-- Read one payment.
SELECT id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant AND id = :id;

-- name: insert_transfer
-- Insert a transfer.
INSERT INTO demo_transfer (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id, :status, :customer_id, :amount_cents, :currency, :created_at);

-- name: newest_transfers
-- List a tenant's transfers, newest first.
SELECT id, status, customer_id, amount_cents, currency, created_at
FROM demo_transfer
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: insert_receipt
-- Insert a receipt, once per payment.
INSERT INTO demo_receipt (tenant, payment_id, sent_at)
VALUES (:tenant, :payment_id, :sent_at)
ON CONFLICT DO NOTHING;

-- name: newest_receipts
-- List a tenant's receipts, newest first.
SELECT payment_id, sent_at
FROM demo_receipt
WHERE tenant = :tenant
ORDER BY payment_id DESC
LIMIT :limit;

-- name: look
-- Check that the tables can be read.
SELECT 1 AS alive FROM demo_order LIMIT 1;
