-- For unknown outcomes: the index that finds their records, the announced calls, and the evidence about calls.
CREATE INDEX record_unknown ON oncekey.record (reconcile_after, scope, key) WHERE state = 'unknown';

-- All announced calls, each with the downstream key that the provider receives. A row is inserted with the
-- announcement. It outlives its record, so that the provider's ledger can be compared with the calls.
CREATE TABLE oncekey.call (
    incarnation    uuid    NOT NULL,  -- of the record that made the call
    phase          text    NOT NULL,
    downstream_key text    NOT NULL,
    provider_id    text,              -- the provider's id of the call; NULL until it is reported
    scope          text    NOT NULL,
    key            text    NOT NULL,
    operation      text    NOT NULL,
    at             bigint  NOT NULL,
    PRIMARY KEY (incarnation, phase)
);
CREATE INDEX call_downstream_key ON oncekey.call (downstream_key);
CREATE INDEX call_provider_id ON oncekey.call (provider_id) WHERE provider_id IS NOT NULL;
CREATE INDEX call_at ON oncekey.call (at, incarnation, phase);

-- Evidence: reports about calls, with their source and time. Rows are only added. Adding one requires no fence or version,
-- because it does not change a record. The verdict is written once, when the outcome of the call is determined.
CREATE TABLE oncekey.evidence (
    id             bigint  NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             bigint  NOT NULL,
    source         text    NOT NULL,
    event_id       text    NOT NULL,  -- identifies repeated reports of a source
    downstream_key text,
    provider_id    text,
    said           text    NOT NULL,  -- JSON
    verdict        text,
    CONSTRAINT about_something CHECK (downstream_key IS NOT NULL OR provider_id IS NOT NULL),
    CONSTRAINT verdict_known CHECK (verdict IN ('settled', 'agrees', 'contradicts'))
);
CREATE UNIQUE INDEX evidence_event ON oncekey.evidence (source, event_id);
CREATE INDEX evidence_open_key ON oncekey.evidence (downstream_key, id) WHERE verdict IS NULL;
CREATE INDEX evidence_open_provider ON oncekey.evidence (provider_id, id) WHERE verdict IS NULL;
CREATE INDEX evidence_open ON oncekey.evidence (id) WHERE verdict IS NULL;
