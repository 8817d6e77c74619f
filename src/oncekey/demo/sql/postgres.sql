-- The demo's tables in PostgreSQL. The primary key serves every statement: ids grow with time.

-- name: one_at_a_time
-- Let one process at a time create the tables.
-- Two processes that start together would both create the tables, and one of them would fail.
SELECT pg_advisory_xact_lock(7223372036854771001) IS NULL AS waited;

-- name: create_orders
-- Create the table of orders.
CREATE TABLE IF NOT EXISTS demo_order (
    tenant      text   NOT NULL,
    id          uuid   NOT NULL,
    status      text   NOT NULL,
    customer_id text   NOT NULL,
    items       jsonb  NOT NULL,
    created_at  bigint NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- name: create_payments
-- Create the table of payments.
CREATE TABLE IF NOT EXISTS demo_payment (
    tenant       text   NOT NULL,
    id           uuid   NOT NULL,
    status       text   NOT NULL,
    charge_id    text,
    customer_id  text   NOT NULL,
    amount_cents bigint NOT NULL,
    currency     text   NOT NULL,
    created_at   bigint NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- name: create_transfers
-- Create the table of transfers.
CREATE TABLE IF NOT EXISTS demo_transfer (
    tenant       text   NOT NULL,
    id           uuid   NOT NULL,
    status       text   NOT NULL,
    customer_id  text   NOT NULL,
    amount_cents bigint NOT NULL,
    currency     text   NOT NULL,
    created_at   bigint NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- name: create_receipts
-- Create the table of receipts.
CREATE TABLE IF NOT EXISTS demo_receipt (
    tenant     text   NOT NULL,
    payment_id uuid   NOT NULL,
    sent_at    bigint NOT NULL,
    PRIMARY KEY (tenant, payment_id)
);

-- name: insert_order
-- Insert an order.
INSERT INTO demo_order (tenant, id, status, customer_id, items, created_at)
VALUES (:tenant, :id::uuid, :status, :customer_id, :items::jsonb, :created_at::bigint);

-- name: newest_orders
-- List a tenant's orders, newest first.
SELECT id::text AS id, status, customer_id, items::text AS items, created_at
FROM demo_order
WHERE tenant = :tenant
ORDER BY demo_order.id DESC
LIMIT :limit::bigint;

-- name: find_order
-- Read one order.
SELECT id::text AS id, status, customer_id, items::text AS items, created_at
FROM demo_order
WHERE tenant = :tenant AND demo_order.id = :id::uuid;

-- name: insert_payment
-- Insert a payment.
INSERT INTO demo_payment (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id::uuid, :status, :customer_id, :amount_cents::bigint, :currency, :created_at::bigint);

-- name: end_payment
-- Store how a payment ended.
UPDATE demo_payment SET status = :status, charge_id = :charge_id WHERE tenant = :tenant AND id = :id::uuid;

-- name: newest_payments
-- List a tenant's payments, newest first.
SELECT id::text AS id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant
ORDER BY demo_payment.id DESC
LIMIT :limit::bigint;

-- name: find_payment
-- Read one payment.
SELECT id::text AS id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant AND demo_payment.id = :id::uuid;

-- name: insert_transfer
-- Insert a transfer.
INSERT INTO demo_transfer (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id::uuid, :status, :customer_id, :amount_cents::bigint, :currency, :created_at::bigint);

-- name: newest_transfers
-- List a tenant's transfers, newest first.
SELECT id::text AS id, status, customer_id, amount_cents, currency, created_at
FROM demo_transfer
WHERE tenant = :tenant
ORDER BY demo_transfer.id DESC
LIMIT :limit::bigint;

-- name: insert_receipt
-- Insert a receipt, once per payment.
INSERT INTO demo_receipt (tenant, payment_id, sent_at)
VALUES (:tenant, :payment_id::uuid, :sent_at::bigint)
ON CONFLICT DO NOTHING;

-- name: newest_receipts
-- List a tenant's receipts, newest first.
SELECT payment_id::text AS payment_id, sent_at
FROM demo_receipt
WHERE tenant = :tenant
ORDER BY demo_receipt.payment_id DESC
LIMIT :limit::bigint;

-- name: look
-- Check that the tables can be read.
SELECT 1 AS alive FROM demo_order LIMIT 1;
