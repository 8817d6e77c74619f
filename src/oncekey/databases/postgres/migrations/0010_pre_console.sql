-- Stands alone: it builds on no post before it.
-- Where operators look through what is not finished, by its state and the newest first. Finished records are in none of
-- these, because every request would pay for that; what is in progress has record_running.
-- Building them reads the tables once, and what writes to them waits meanwhile.
CREATE INDEX record_waiting ON oncekey.record (state, created_at, scope, key)
    WHERE state IN ('pending', 'failed_retryable', 'unknown');

-- What was heard about a call and judged; what is not judged yet has indexes of its own.
CREATE INDEX evidence_judged_key ON oncekey.evidence (downstream_key, id) WHERE verdict IS NOT NULL;
CREATE INDEX evidence_judged_provider ON oncekey.evidence (provider_id, id) WHERE verdict IS NOT NULL;
