-- Diagnostics of MariaDB. Nothing here writes or needs rights beyond oncekey's own tables.

-- name: diagnostic_indexes
-- List oncekey's indexes, so that a missing or broken one is found.
SELECT DISTINCT entry.index_name AS name, entry.table_name AS on_table
FROM information_schema.statistics AS entry
WHERE entry.table_schema = DATABASE() AND entry.table_name LIKE 'oncekey\_%' AND entry.index_name <> 'PRIMARY'
ORDER BY entry.index_name;

-- name: diagnostic_server
-- Read the server's settings that decide whether a commit is durable.
-- SHOW VARIABLES and SHOW STATUS are separate statements on both; a variable that a server does not have returns no row.
SHOW GLOBAL VARIABLES WHERE Variable_name IN (
    'version', 'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'innodb_doublewrite', 'read_only', 'wsrep_on',
    'innodb_rollback_on_timeout', 'max_allowed_packet');

-- name: diagnostic_cluster
-- Read the state of the cluster, if the server is in one.
SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_cluster_size', 'wsrep_cluster_status', 'wsrep_local_state_comment');
