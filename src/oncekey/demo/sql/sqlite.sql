-- The demo's orders in SQLite. The primary key serves every statement: ids grow with time.

-- name: create_table
CREATE TABLE IF NOT EXISTS demo_order (
    tenant      TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    status      TEXT    NOT NULL,
    customer_id TEXT    NOT NULL,
    items       TEXT    NOT NULL CHECK (json_valid(items)),
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
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

-- name: look
SELECT 1 AS alive FROM demo_order LIMIT 1;
