-- The demo's tables in SQLite. The primary key serves every statement: ids grow with time.

-- name: create_orders
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
CREATE TABLE IF NOT EXISTS demo_receipt (
    tenant     TEXT    NOT NULL,
    payment_id TEXT    NOT NULL,
    sent_at    INTEGER NOT NULL,
    PRIMARY KEY (tenant, payment_id)
) STRICT, WITHOUT ROWID;

-- name: insert_order
INSERT INTO demo_order (tenant, id, status, customer_id, items, created_at)
VALUES (:tenant, :id, :status, :customer_id, :items, :created_at);

-- name: newest_orders
SELECT id, status, customer_id, items, created_at
FROM demo_order
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: find_order
SELECT id, status, customer_id, items, created_at
FROM demo_order
WHERE tenant = :tenant AND id = :id;

-- name: insert_payment
INSERT INTO demo_payment (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id, :status, :customer_id, :amount_cents, :currency, :created_at);

-- name: end_payment
UPDATE demo_payment SET status = :status, charge_id = :charge_id WHERE tenant = :tenant AND id = :id;

-- name: newest_payments
SELECT id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: find_payment
SELECT id, status, charge_id, customer_id, amount_cents, currency, created_at
FROM demo_payment
WHERE tenant = :tenant AND id = :id;

-- name: insert_transfer
INSERT INTO demo_transfer (tenant, id, status, customer_id, amount_cents, currency, created_at)
VALUES (:tenant, :id, :status, :customer_id, :amount_cents, :currency, :created_at);

-- name: newest_transfers
SELECT id, status, customer_id, amount_cents, currency, created_at
FROM demo_transfer
WHERE tenant = :tenant
ORDER BY id DESC
LIMIT :limit;

-- name: insert_receipt
INSERT INTO demo_receipt (tenant, payment_id, sent_at)
VALUES (:tenant, :payment_id, :sent_at)
ON CONFLICT DO NOTHING;

-- name: newest_receipts
SELECT payment_id, sent_at
FROM demo_receipt
WHERE tenant = :tenant
ORDER BY payment_id DESC
LIMIT :limit;

-- name: look
SELECT 1 AS alive FROM demo_order LIMIT 1;
