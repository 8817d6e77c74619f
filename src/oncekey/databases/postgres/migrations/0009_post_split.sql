-- Drops the columns of `record` that are in `work`. Run it when no older code is left. It reads all records once, and
-- locks the table only for its last statements.

-- Records that were finished before 0008 and have steps: the trigger of 0008 copies these to `work`.
UPDATE oncekey.record AS record SET memo_version = -1
WHERE record.memo_version < 0
  AND (num_nonnulls(record.memo, record.intent, record.request, record.reconcile_after) > 0 OR record.reconcile_tries > 0);

DROP TRIGGER split_inserted ON oncekey.record;
DROP TRIGGER split_updated ON oncekey.record;
DROP TRIGGER split_removed ON oncekey.record;
DROP TRIGGER split_written ON oncekey.work;
DROP FUNCTION oncekey.split_old(), oncekey.split_removed(), oncekey.split_new();
DROP FUNCTION oncekey.lock_key(bigint, text, text, integer, integer);
DROP FUNCTION oncekey.lock_request(bigint, integer, integer, text, text, bigint, integer, integer);

CREATE OR REPLACE VIEW oncekey.whole AS
SELECT record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery, record.method,
       record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered, record.fence,
       record.version, record.owner, record.lease_until, record.deadline, record.call_timeout, record.ttl, record.attempts,
       record.recovery_point, record.response_status, record.response_headers, record.response_body,
       record.response_schema, record.last_error, record.created_at, record.last_run_at, record.finished_at,
       record.expires_at,
       work.memo, work.intent, work.request, work.reconcile_after, COALESCE(work.reconcile_tries, 0) AS reconcile_tries
FROM oncekey.record AS record
LEFT JOIN oncekey.work AS work ON work.incarnation = record.incarnation;

DROP INDEX oncekey.record_unknown;
ALTER TABLE oncekey.record
    ALTER COLUMN memo_version SET DEFAULT 0,
    DROP COLUMN memo, DROP COLUMN intent, DROP COLUMN request, DROP COLUMN reconcile_after, DROP COLUMN reconcile_tries;
