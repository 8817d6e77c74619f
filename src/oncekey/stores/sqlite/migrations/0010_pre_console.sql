-- Stands alone: it builds on no post before it.
-- Where operators look through what is not finished, by its state and the newest first. Finished records are in none of
-- these, because every request would pay for that; what is in progress has oncekey_record_running.
CREATE INDEX oncekey_record_waiting ON oncekey_record (state, created_at, scope, key)
    WHERE state IN ('pending', 'failed_retryable', 'unknown');

-- All that was heard about a call, judged or not.
CREATE INDEX oncekey_evidence_key ON oncekey_evidence (downstream_key, id) WHERE downstream_key IS NOT NULL;
CREATE INDEX oncekey_evidence_provider ON oncekey_evidence (provider_id, id) WHERE provider_id IS NOT NULL;
