-- The tables, in the application's own database. Instants and durations are microseconds; instants are the server's clock.
-- Whatever is compared is VARBINARY: byte by byte, whatever the case, the accents or the blanks at its end. It holds UTF-8, and
-- the driver reads it as text; what holds bytes is a BLOB.
-- Every statement may be said again: see ledger.sql.

CREATE TABLE IF NOT EXISTS oncekey_record (
    scope            VARBINARY(2000) NOT NULL,  -- who: namespace and tenant, in one injective text
    `key`            VARBINARY(1024) NOT NULL,  -- the client's key, opaque, byte-exact
    incarnation      VARBINARY(36)   NOT NULL,  -- this life of the key; everything that hangs on a record hangs on it
    operation        VARBINARY(1024) NOT NULL,  -- the enrolled handler
    effects          VARBINARY(16)   NOT NULL,  -- what a crash means is stored with the claim, so a deploy cannot change it
    recovery         VARBINARY(16)   NOT NULL,
    method           VARBINARY(255)  NOT NULL,
    path             MEDIUMTEXT      NOT NULL,
    fingerprint      VARBINARY(512)  NOT NULL,  -- of the request, with its algorithm's version; compared before anything else
    seed             BLOB            NOT NULL,  -- downstream keys are derived from it, over attempts and take-overs
    state            VARBINARY(16)   NOT NULL,
    outcome          VARBINARY(16),
    entered          BOOLEAN         NOT NULL,
    fence            BIGINT          NOT NULL,  -- up with each new owner; owners prove incarnation and fence
    version          BIGINT          NOT NULL,  -- up with each write; strangers prove incarnation and version
    owner            VARBINARY(1024),
    lease_until      BIGINT,
    deadline         BIGINT          NOT NULL,  -- the heartbeat stops here
    call_timeout     BIGINT          NOT NULL,
    ttl              BIGINT          NOT NULL,
    attempts         INTEGER         NOT NULL,
    recovery_point   VARBINARY(1024) NOT NULL,
    memo             LONGTEXT,                  -- finished phases, in order
    intent           LONGTEXT,                  -- the announced outside call that has no result yet
    response_status  INTEGER,
    response_headers LONGTEXT,
    response_body    LONGBLOB,                  -- bytes, a replay is byte for byte; NULL with a status is a tombstone
    response_schema  INTEGER,
    last_error       MEDIUMTEXT,
    reconcile_after  BIGINT,
    reconcile_tries  INTEGER         NOT NULL,
    created_at       BIGINT          NOT NULL,
    last_run_at      BIGINT          NOT NULL,
    finished_at      BIGINT,
    expires_at       BIGINT          NOT NULL,
    request          LONGBLOB,                  -- as a completer repeats it; gone with the settlement
    PRIMARY KEY (scope, `key`),
    -- Where sweepers, completers, resolvers and operators look; an index of InnoDB ends with the primary key by itself.
    INDEX oncekey_record_state (state, created_at),
    -- Where reapers look.
    INDEX oncekey_record_expiring (expires_at),
    CONSTRAINT oncekey_record_effects_known CHECK (effects IN ('local', 'phased', 'outbox', 'inline')),
    CONSTRAINT oncekey_record_recovery_known CHECK (recovery IN ('retry', 'resume', 'unknown', 'fail')),
    CONSTRAINT oncekey_record_state_known CHECK (
        state IN ('pending', 'in_progress', 'completed', 'failed_retryable', 'unknown', 'expired')),
    CONSTRAINT oncekey_record_counts_up CHECK (fence >= 1 AND version >= 1 AND attempts >= 0 AND reconcile_tries >= 0),
    CONSTRAINT oncekey_record_completed_has_answer CHECK (
        state <> 'completed'
        OR (response_status IS NOT NULL AND response_headers IS NOT NULL AND response_schema IS NOT NULL
            AND outcome IS NOT NULL AND outcome IN ('success', 'failure') AND finished_at IS NOT NULL)),
    CONSTRAINT oncekey_record_completed_has_no_intent CHECK (state <> 'completed' OR intent IS NULL),
    CONSTRAINT oncekey_record_answer_only_when_done CHECK (
        state IN ('completed', 'expired') OR (response_status IS NULL AND outcome IS NULL)),
    CONSTRAINT oncekey_record_owned_in_progress CHECK (
        state <> 'in_progress' OR effects = 'outbox' OR (owner IS NOT NULL AND lease_until IS NOT NULL)),
    CONSTRAINT oncekey_record_owned_only_in_progress CHECK (state = 'in_progress' OR (owner IS NULL AND lease_until IS NULL)),
    CONSTRAINT oncekey_record_unknown_has_ticket CHECK (state <> 'unknown' OR last_error IS NOT NULL)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Who executes a LOCAL request right now: the row is inserted first in its transaction and deleted last, so nobody ever sees
-- one but by its lock (L1). A row that is not locked was left by a handler that committed by itself, and means nothing.
CREATE TABLE IF NOT EXISTS oncekey_lock (
    number BIGINT  NOT NULL PRIMARY KEY,  -- of the key
    mark   INTEGER NOT NULL               -- of the request
) ENGINE = InnoDB;

-- The outbox. The first five columns are those that Debezium's outbox router reads by default.
CREATE TABLE IF NOT EXISTS oncekey_outbox (
    id             VARBINARY(36)   NOT NULL UNIQUE,
    aggregatetype  VARCHAR(512)    NOT NULL,  -- the topic: Debezium routes by it
    aggregateid    VARCHAR(1024)   NOT NULL,  -- what is ordered by, else the record's incarnation: Debezium's message key
    type           VARCHAR(512)    NOT NULL,  -- the topic once more, as the event's type
    payload        LONGTEXT        NOT NULL,  -- JSON
    kind           VARBINARY(8)    NOT NULL,
    scope          VARBINARY(2000) NOT NULL,
    `key`          VARBINARY(1024) NOT NULL,
    incarnation    VARBINARY(36)   NOT NULL,  -- the life of the key that the parcel belongs to
    downstream_key VARBINARY(1024) NOT NULL,  -- for the receiver to recognise a repetition by
    position       INTEGER         NOT NULL,  -- among the parcels of one transaction
    order_by       VARBINARY(1024),
    state          VARBINARY(8)    NOT NULL,
    attempts       INTEGER         NOT NULL,
    fence          BIGINT          NOT NULL,  -- up with each claim; a worker proves it
    owner          VARBINARY(1024),
    lease_until    BIGINT,
    due_at         BIGINT          NOT NULL,  -- when somebody may take it next; while it is held, the end of its lease
    created_at     BIGINT          NOT NULL,
    first_error    MEDIUMTEXT,
    last_error     MEDIUMTEXT,
    place          BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,  -- in the line of those with the same order_by
    -- What is due next, ready or with a lease that ran out.
    INDEX oncekey_outbox_due (due_at),
    -- Who is first of those that keep an order.
    INDEX oncekey_outbox_order (order_by),
    -- The parcel of a record.
    INDEX oncekey_outbox_incarnation (incarnation),
    -- What one call of a worker's took.
    INDEX oncekey_outbox_owner (owner),
    CONSTRAINT oncekey_outbox_kind_known CHECK (kind IN ('defer', 'emit')),
    CONSTRAINT oncekey_outbox_state_known CHECK (state IN ('ready', 'held')),
    CONSTRAINT oncekey_outbox_held_has_lease CHECK ((state = 'held') = (owner IS NOT NULL AND lease_until IS NOT NULL))
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Parcels that were tried too often, or whose outcome nobody knows; with the first and the last error.
CREATE TABLE IF NOT EXISTS oncekey_dead_letter (
    id             VARBINARY(36)   NOT NULL PRIMARY KEY,
    aggregatetype  VARCHAR(512)    NOT NULL,
    aggregateid    VARCHAR(1024)   NOT NULL,
    type           VARCHAR(512)    NOT NULL,
    payload        LONGTEXT        NOT NULL,
    kind           VARBINARY(8)    NOT NULL,
    scope          VARBINARY(2000) NOT NULL,
    `key`          VARBINARY(1024) NOT NULL,
    incarnation    VARBINARY(36)   NOT NULL,
    downstream_key VARBINARY(1024) NOT NULL,
    position       INTEGER         NOT NULL,
    order_by       VARBINARY(1024),
    attempts       INTEGER         NOT NULL,
    fence          BIGINT          NOT NULL,
    created_at     BIGINT          NOT NULL,
    first_error    MEDIUMTEXT,
    last_error     MEDIUMTEXT      NOT NULL,
    died_at        BIGINT          NOT NULL,
    INDEX oncekey_dead_letter_died (died_at),
    INDEX oncekey_dead_letter_incarnation (incarnation)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Every move of a record that its own request did not make: only added to, and forgotten after a time of its own.
-- Lines are about an incarnation, so they outlive its record. The key is kept as its digest only.
CREATE TABLE IF NOT EXISTS oncekey_audit (
    id          BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at          BIGINT          NOT NULL,
    scope       VARBINARY(2000) NOT NULL,
    key_digest  VARBINARY(128)  NOT NULL,
    incarnation VARBINARY(36)   NOT NULL,
    operation   VARBINARY(1024) NOT NULL,
    fence       BIGINT          NOT NULL,
    source      VARBINARY(16),              -- NULL is "no row"
    target      VARBINARY(16),              -- NULL is "no row"
    `trigger`   VARBINARY(64)   NOT NULL,
    actor       VARBINARY(64)   NOT NULL,   -- which part was played
    who         MEDIUMTEXT      NOT NULL,   -- by which process or person
    why         MEDIUMTEXT      NOT NULL,
    INDEX oncekey_audit_key (scope, key_digest)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Every call that was announced, by the name that the provider knows it by. It outlives its record, so that the provider's
-- books can be compared with ours.
CREATE TABLE IF NOT EXISTS oncekey_call (
    incarnation    VARBINARY(36)   NOT NULL,  -- the life of the key that made it
    phase          VARBINARY(1024) NOT NULL,
    downstream_key VARBINARY(1024) NOT NULL,
    provider_id    VARBINARY(1024),           -- the provider's own name for it, once somebody told us
    scope          VARBINARY(2000) NOT NULL,
    `key`          VARBINARY(1024) NOT NULL,
    operation      VARBINARY(1024) NOT NULL,
    at             BIGINT          NOT NULL,
    PRIMARY KEY (incarnation, phase),
    INDEX oncekey_call_downstream_key (downstream_key),
    INDEX oncekey_call_provider_id (provider_id),
    INDEX oncekey_call_at (at)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- What was heard about calls, from whom and when: only added to, and needing no proof, because it moves nothing by itself.
-- The verdict is written once, when what became of the call is known.
CREATE TABLE IF NOT EXISTS oncekey_evidence (
    id             BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at             BIGINT          NOT NULL,
    source         VARBINARY(512)  NOT NULL,
    event_id       VARBINARY(1024) NOT NULL,  -- by which a repetition is recognised
    downstream_key VARBINARY(1024),
    provider_id    VARBINARY(1024),
    said           LONGTEXT        NOT NULL,  -- JSON
    verdict        VARBINARY(16),
    UNIQUE INDEX oncekey_evidence_event (source, event_id),
    INDEX oncekey_evidence_key (downstream_key),
    INDEX oncekey_evidence_provider (provider_id),
    INDEX oncekey_evidence_open (verdict),
    CONSTRAINT oncekey_evidence_about_something CHECK (downstream_key IS NOT NULL OR provider_id IS NOT NULL),
    CONSTRAINT oncekey_evidence_verdict_known CHECK (verdict IN ('settled', 'agrees', 'contradicts'))
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Which workers are alive: each writes its row again and again, and deletes it when it stops.
CREATE TABLE IF NOT EXISTS oncekey_worker (
    name       VARBINARY(1024) NOT NULL PRIMARY KEY,  -- one process
    tasks      MEDIUMTEXT      NOT NULL,              -- what it runs, as a JSON array of names
    started_at BIGINT          NOT NULL,
    seen_at    BIGINT          NOT NULL,              -- by the store's clock
    every      BIGINT          NOT NULL,              -- after how long it promises to be seen again
    calls      MEDIUMTEXT      NOT NULL               -- the calls of INLINE handlers, which announce none: {operation: [name]}
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;
