-- The demo's orders in PostgreSQL. The primary key serves every statement: ids grow with time.

-- name: one_at_a_time
-- Two processes that start together would both create the table, and one of them would fail.
SELECT pg_advisory_xact_lock(7223372036854771001) IS NULL AS waited;

-- name: create_table
CREATE TABLE IF NOT EXISTS demo_order (
    tenant      text   NOT NULL,
    id          uuid   NOT NULL,
    status      text   NOT NULL,
    customer_id text   NOT NULL,
    items       jsonb  NOT NULL,
    created_at  bigint NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- name: insert_order
INSERT INTO demo_order (tenant, id, status, customer_id, items, created_at)
VALUES (:tenant, :id::uuid, :status, :customer_id, :items::jsonb, :created_at::bigint);

-- name: newest_orders
SELECT id::text AS id, status, customer_id, items::text AS items, created_at
FROM demo_order
WHERE tenant = :tenant
ORDER BY demo_order.id DESC
LIMIT :limit::bigint;

-- name: find_order
SELECT id::text AS id, status, customer_id, items::text AS items, created_at
FROM demo_order
WHERE tenant = :tenant AND demo_order.id = :id::uuid;

-- name: look
SELECT 1 AS alive FROM demo_order LIMIT 1;
