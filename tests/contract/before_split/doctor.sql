-- What PostgreSQL says about itself. Nothing here writes, and nothing needs more rights than oncekey's own tables:
-- what other users' sessions do is counted as hidden where this one may not see it.

-- name: diagnostic_clock
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now;

-- name: diagnostic_indexes
SELECT index.relname AS name, parent.relname AS on_table, entry.indisvalid AND entry.indisready AS valid,
       COALESCE(used.idx_scan, 0)::bigint AS scans, GREATEST(parent.reltuples, 0)::bigint AS rows
FROM pg_index AS entry
JOIN pg_class AS index ON index.oid = entry.indexrelid
JOIN pg_class AS parent ON parent.oid = entry.indrelid
JOIN pg_namespace AS space ON space.oid = parent.relnamespace
LEFT JOIN pg_stat_user_indexes AS used ON used.indexrelid = entry.indexrelid
WHERE space.nspname = 'oncekey'
ORDER BY index.relname;

-- name: diagnostic_tables
SELECT stat.relname AS name, stat.n_live_tup::bigint AS live, stat.n_dead_tup::bigint AS dead,
       pg_total_relation_size(stat.relid)::bigint AS bytes,
       (extract(epoch FROM GREATEST(stat.last_autovacuum, stat.last_vacuum)) * 1000000)::bigint AS last_autovacuum
FROM pg_stat_user_tables AS stat
WHERE stat.schemaname = 'oncekey'
ORDER BY stat.relname;

-- name: diagnostic_sessions
SELECT count(*) FILTER (WHERE state LIKE 'idle in transaction%')::bigint AS idle,
       COALESCE(max((extract(epoch FROM clock_timestamp() - state_change) * 1000000)::bigint)
           FILTER (WHERE state LIKE 'idle in transaction%'), 0) AS longest_idle,
       COALESCE(max((extract(epoch FROM clock_timestamp() - xact_start) * 1000000)::bigint), 0) AS oldest_transaction,
       COALESCE(max(age(backend_xmin)), 0)::bigint AS oldest_xmin,
       count(*) FILTER (WHERE state IS NULL AND backend_type = 'client backend')::bigint AS hidden
FROM pg_stat_activity
-- What stands open in another database keeps no row of this one; a standby's feedback does.
WHERE pid <> pg_backend_pid() AND (datname = current_database() OR backend_type = 'walsender');

-- name: diagnostic_holders
SELECT (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database())::bigint AS prepared,
       (SELECT COALESCE(max(age(xmin)), 0) FROM pg_replication_slots)::bigint AS slot_xmin;

-- name: diagnostic_settings
SELECT name, setting AS value
FROM pg_settings
WHERE name IN ('server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'transaction_timeout',
               'autovacuum', 'track_counts', 'default_transaction_isolation', 'default_transaction_read_only')
ORDER BY name;

-- name: diagnostic_ttl
SELECT COALESCE(min(record.ttl), 0)::bigint AS shortest_ttl, COALESCE(max(record.call_timeout), 0)::bigint AS longest_call
FROM (SELECT ttl, call_timeout FROM oncekey.record LIMIT 1000) AS record;
