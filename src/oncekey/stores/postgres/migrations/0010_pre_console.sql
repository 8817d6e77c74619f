-- Stands alone: it builds on no post before it.
-- Where operators look through what is not finished, by its state and the newest first. Finished records are in none of
-- these, because every request would pay for that; what is in progress has record_running.
-- Building them reads the tables once, and what writes to them waits meanwhile.
CREATE INDEX record_waiting ON oncekey.record (state, created_at, scope, key)
    WHERE state IN ('pending', 'failed_retryable', 'unknown');

-- All that was heard about a call, judged or not.
CREATE INDEX evidence_key ON oncekey.evidence (downstream_key, id) WHERE downstream_key IS NOT NULL;
CREATE INDEX evidence_provider ON oncekey.evidence (provider_id, id) WHERE provider_id IS NOT NULL;
