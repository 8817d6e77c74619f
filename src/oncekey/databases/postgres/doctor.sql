-- Diagnostics of PostgreSQL. Nothing here writes or needs rights beyond oncekey's own tables: sessions of other users
-- are counted as hidden if this user may not see them.

-- name: diagnostic_clock
-- Read the database's clock, to compare it with the machine's.
SELECT {now} AS now;

-- name: diagnostic_indexes
-- List oncekey's indexes, so that a missing or broken one is found.
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
-- Read the size and the dead rows of oncekey's tables.
SELECT stat.relname AS name, stat.n_live_tup::bigint AS live, stat.n_dead_tup::bigint AS dead,
       pg_total_relation_size(stat.relid)::bigint AS bytes,
       (extract(epoch FROM GREATEST(stat.last_autovacuum, stat.last_vacuum)) * 1000000)::bigint AS last_autovacuum
FROM pg_stat_user_tables AS stat
WHERE stat.schemaname = 'oncekey'
ORDER BY stat.relname;

-- name: diagnostic_sessions
-- Measure the open transactions of other sessions, which keep dead rows from being removed.
SELECT count(*) FILTER (WHERE state LIKE 'idle in transaction%')::bigint AS idle,
       COALESCE(max((extract(epoch FROM clock_timestamp() - state_change) * 1000000)::bigint)
           FILTER (WHERE state LIKE 'idle in transaction%'), 0) AS longest_idle,
       COALESCE(max((extract(epoch FROM clock_timestamp() - xact_start) * 1000000)::bigint), 0) AS oldest_transaction,
       COALESCE(max(age(backend_xmin)), 0)::bigint AS oldest_xmin,
       count(*) FILTER (WHERE state IS NULL AND backend_type = 'client backend')::bigint AS hidden
FROM pg_stat_activity
-- A transaction that is open in another database keeps no dead row of this one alive; a standby's feedback does.
WHERE pid <> pg_backend_pid() AND (datname = current_database() OR backend_type = 'walsender');

-- name: diagnostic_holders
-- Measure prepared transactions and replication slots, which keep dead rows from being removed.
SELECT (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database())::bigint AS prepared,
       (SELECT COALESCE(max(age(xmin)), 0) FROM pg_replication_slots)::bigint AS slot_xmin;

-- name: diagnostic_settings
-- Read the server's settings that decide whether a commit is durable.
SELECT name, setting AS value
FROM pg_settings
WHERE name IN ('server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'transaction_timeout',
               'autovacuum', 'track_counts', 'default_transaction_isolation', 'default_transaction_read_only',
               'in_hot_standby', 'synchronous_standby_names')
ORDER BY name;

-- name: diagnostic_ttl
-- Read the shortest ttl and the longest call timeout of stored records.
SELECT COALESCE(min(record.ttl), 0)::bigint AS shortest_ttl, COALESCE(max(record.call_timeout), 0)::bigint AS longest_call
FROM (SELECT ttl, call_timeout FROM oncekey.record LIMIT 1000) AS record;

-- name: diagnostic_rows
-- Count the rows that break a rule which every statement keeps.
-- No oncekey statement writes such rows. The table's one check prevents rows that could not be replayed; the other rules
-- are checked here, in a bounded number of unfinished, finished and other rows.
WITH looked AS MATERIALIZED (
    SELECT DISTINCT ON (record.scope, record.key) record.*
    FROM (
        (SELECT one.* FROM oncekey.record AS one
         WHERE one.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
         ORDER BY one.key COLLATE "C", one.scope LIMIT 10000)
        UNION ALL
        (SELECT one.* FROM oncekey.record AS one
         WHERE one.state IN ('completed', 'failed_retryable', 'pending')
         ORDER BY one.expires_at DESC, one.scope DESC, one.key DESC LIMIT 1000)
        UNION ALL
        (SELECT one.* FROM oncekey.record AS one LIMIT 1000)) AS record
)
SELECT rule.name, count(*)::bigint AS records
FROM looked AS record
LEFT JOIN oncekey.work AS work ON work.incarnation = record.incarnation
CROSS JOIN LATERAL (VALUES
    ('effects_known', record.effects NOT IN ('local', 'phased', 'outbox', 'inline')),
    ('recovery_known', record.recovery NOT IN ('retry', 'resume', 'unknown', 'fail')),
    ('state_known',
     record.state NOT IN ('pending', 'in_progress', 'completed', 'failed_retryable', 'unknown', 'expired')),
    ('outcome_known', record.outcome NOT IN ('success', 'failure')),
    ('counts_up', record.fence < 1 OR record.version < 1 OR record.attempts < 0),
    ('completed_has_answer',
     record.state = 'completed'
     AND num_nulls(record.response_status, record.response_headers, record.response_schema, record.outcome,
                   record.finished_at) > 0),
    ('completed_has_no_intent', record.state = 'completed' AND work.intent IS NOT NULL),
    ('answer_only_when_done',
     record.state NOT IN ('completed', 'expired') AND num_nonnulls(record.response_status, record.outcome) > 0),
    ('owned_in_progress',
     record.state = 'in_progress' AND record.effects <> 'outbox' AND num_nulls(record.owner, record.lease_until) > 0),
    ('owned_only_in_progress',
     record.state <> 'in_progress' AND num_nonnulls(record.owner, record.lease_until) > 0),
    ('unknown_has_ticket', record.state = 'unknown' AND record.last_error IS NULL),
    ('memo_has_version', (work.memo_version > 0) <> (work.memo IS NOT NULL OR work.intent IS NOT NULL)),
    ('tries_count_up', work.reconcile_tries < 0),
    ('work_fits', GREATEST(record.memo_version, 0) <> COALESCE(work.memo_version, 0))
) AS rule (name, broken)
WHERE rule.broken
GROUP BY rule.name
UNION ALL
SELECT 'work_has_record', count(*)::bigint
FROM (SELECT one.scope, one.key, one.incarnation FROM oncekey.work AS one LIMIT 10000) AS work
WHERE NOT EXISTS (
    SELECT FROM oncekey.record AS record
    WHERE record.scope = work.scope AND record.key = work.key AND record.incarnation = work.incarnation)
HAVING count(*) > 0
ORDER BY name;
