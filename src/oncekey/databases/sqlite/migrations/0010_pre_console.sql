-- Stands alone: it builds on no post before it.
-- Lists unfinished records for operators, by state and newest first. Finished records are not indexed, because that
-- would slow down every request; oncekey_record_running has the records in progress.
CREATE INDEX oncekey_record_waiting ON oncekey_record (state, created_at, scope, key)
    WHERE state IN ('pending', 'failed_retryable', 'unknown');

-- Finds the evidence about a call that has a verdict. Separate indexes find evidence without one.
CREATE INDEX oncekey_evidence_judged_key ON oncekey_evidence (downstream_key, id) WHERE verdict IS NOT NULL;
CREATE INDEX oncekey_evidence_judged_provider ON oncekey_evidence (provider_id, id) WHERE verdict IS NOT NULL;
