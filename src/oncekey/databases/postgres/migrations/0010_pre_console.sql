-- Stands alone: it builds on no post before it.
-- Lists unfinished records for operators, by state and newest first. Finished records are not indexed, because that
-- would slow down every request; record_running has the records in progress.
-- Building the indexes reads each table once, and blocks writes to it meanwhile.
CREATE INDEX record_waiting ON oncekey.record (state, created_at, scope, key)
    WHERE state IN ('pending', 'failed_retryable', 'unknown');

-- Finds the evidence about a call that has a verdict. Separate indexes find evidence without one.
CREATE INDEX evidence_judged_key ON oncekey.evidence (downstream_key, id) WHERE verdict IS NOT NULL;
CREATE INDEX evidence_judged_provider ON oncekey.evidence (provider_id, id) WHERE verdict IS NOT NULL;
