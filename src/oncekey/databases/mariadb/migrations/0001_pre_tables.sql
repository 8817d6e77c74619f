-- The tables, in the application's database. Instants and durations are in microseconds; instants are by the server's
-- clock. Columns that are compared are VARBINARY, so that case, accents and trailing spaces count. They contain UTF-8,
-- and the driver reads them as text; columns with bytes are BLOBs.
-- Every statement can be run again: see ledger.sql.

CREATE TABLE IF NOT EXISTS oncekey_record (
    scope            VARBINARY(2000) NOT NULL,  -- the caller's namespace and tenant, in an unambiguous encoding
    `key`            VARBINARY(1024) NOT NULL,  -- the client's key, byte for byte; it is never interpreted
    incarnation      VARBINARY(36)   NOT NULL,  -- identifies one life of the key; other tables refer to a record by it
    operation        VARBINARY(1024) NOT NULL,  -- the name of the protected handler
    effects          VARBINARY(16)   NOT NULL,  -- stored with the claim: a deployment cannot change what a crash means
    recovery         VARBINARY(16)   NOT NULL,
    method           VARBINARY(255)  NOT NULL,
    path             MEDIUMTEXT      NOT NULL,
    fingerprint      VARBINARY(512)  NOT NULL,  -- hash of the request, with the algorithm's version; it is compared first
    seed             BLOB            NOT NULL,  -- source of the downstream keys; the same for all attempts and owners
    state            VARBINARY(16)   NOT NULL,
    outcome          VARBINARY(16),
    entered          BOOLEAN         NOT NULL,
    fence            BIGINT          NOT NULL,  -- raised by each new owner; the owner's writes must match incarnation and fence
    version          BIGINT          NOT NULL,  -- raised by each write; writes of others must match incarnation and version
    owner            VARBINARY(1024),
    lease_until      BIGINT,
    deadline         BIGINT          NOT NULL,  -- the owner does not renew its lease beyond this instant
    call_timeout     BIGINT          NOT NULL,
    ttl              BIGINT          NOT NULL,
    attempts         INTEGER         NOT NULL,
    recovery_point   VARBINARY(1024) NOT NULL,
    memo             LONGTEXT,                  -- the results of the finished steps, in order
    intent           LONGTEXT,                  -- the announced external call that has no result yet
    response_status  INTEGER,
    response_headers LONGTEXT,
    response_body    LONGBLOB,                  -- bytes, for an exact replay; NULL with a status is a tombstone
    response_schema  INTEGER,
    last_error       MEDIUMTEXT,
    reconcile_after  BIGINT,
    reconcile_tries  INTEGER         NOT NULL,
    created_at       BIGINT          NOT NULL,
    last_run_at      BIGINT          NOT NULL,
    finished_at      BIGINT,
    expires_at       BIGINT          NOT NULL,
    request          LONGBLOB,                  -- the stored request, for the completer; NULL after the settlement
    PRIMARY KEY (scope, `key`),
    -- For the sweeper, the completer, the reconciler and operators. InnoDB appends the primary key to each index.
    INDEX oncekey_record_state (state, created_at),
    -- For the reaper.
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

-- The LOCAL requests that are running. Their transaction inserts a row first and deletes it last, so that only its lock is
-- visible to others (L1). A row that is not locked was left by a handler that committed by itself, and has no effect.
CREATE TABLE IF NOT EXISTS oncekey_lock (
    number BIGINT  NOT NULL PRIMARY KEY,  -- the number of the key's lock
    mark   INTEGER NOT NULL               -- identifies the request that holds it
) ENGINE = InnoDB;

-- The outbox. Debezium's outbox router reads the first five columns by default.
CREATE TABLE IF NOT EXISTS oncekey_outbox (
    id             VARBINARY(36)   NOT NULL UNIQUE,
    aggregatetype  VARCHAR(512)    NOT NULL,  -- the topic; Debezium routes by it
    aggregateid    VARCHAR(1024)   NOT NULL,  -- order_by, or else the record's incarnation; Debezium's message key
    type           VARCHAR(512)    NOT NULL,  -- the topic again, as the type of the event
    payload        LONGTEXT        NOT NULL,  -- JSON
    kind           VARBINARY(8)    NOT NULL,
    scope          VARBINARY(2000) NOT NULL,
    `key`          VARBINARY(1024) NOT NULL,
    incarnation    VARBINARY(36)   NOT NULL,  -- of the record that the parcel belongs to
    downstream_key VARBINARY(1024) NOT NULL,  -- the receiver recognises a repeated delivery by it
    position       INTEGER         NOT NULL,  -- the order among the parcels of one transaction
    order_by       VARBINARY(1024),
    state          VARBINARY(8)    NOT NULL,
    attempts       INTEGER         NOT NULL,
    fence          BIGINT          NOT NULL,  -- raised by each claim; a worker's write must match it
    owner          VARBINARY(1024),
    lease_until    BIGINT,
    due_at         BIGINT          NOT NULL,  -- when a worker may claim it next; while it is held, the end of its lease
    created_at     BIGINT          NOT NULL,
    first_error    MEDIUMTEXT,
    last_error     MEDIUMTEXT,
    place          BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,  -- the order among parcels with the same order_by
    -- Finds due parcels: ready ones, and held ones whose lease has expired.
    INDEX oncekey_outbox_due (due_at),
    -- Finds the first of the parcels with the same order_by.
    INDEX oncekey_outbox_order (order_by),
    -- Finds the parcels of a record.
    INDEX oncekey_outbox_incarnation (incarnation),
    -- Finds the parcels that one claim of a worker acquired.
    INDEX oncekey_outbox_owner (owner),
    CONSTRAINT oncekey_outbox_kind_known CHECK (kind IN ('defer', 'emit')),
    CONSTRAINT oncekey_outbox_state_known CHECK (state IN ('ready', 'held')),
    CONSTRAINT oncekey_outbox_held_has_lease CHECK ((state = 'held') = (owner IS NOT NULL AND lease_until IS NOT NULL))
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Dead letters: parcels that failed too often, or whose outcome is unknown, with their first and last error.
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

-- The audit: changes to records that their own request did not make. Lines are only added, and have a separate retention
-- time. They refer to an incarnation, so they outlive its record, and contain a digest of the key, not the key.
CREATE TABLE IF NOT EXISTS oncekey_audit (
    id          BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at          BIGINT          NOT NULL,
    scope       VARBINARY(2000) NOT NULL,
    key_digest  VARBINARY(128)  NOT NULL,
    incarnation VARBINARY(36)   NOT NULL,
    operation   VARBINARY(1024) NOT NULL,
    fence       BIGINT          NOT NULL,
    source      VARBINARY(16),              -- the state before; NULL: no record
    target      VARBINARY(16),              -- the state after; NULL: no record
    `trigger`   VARBINARY(64)   NOT NULL,
    actor       VARBINARY(64)   NOT NULL,   -- the role, such as sweeper or operator
    who         MEDIUMTEXT      NOT NULL,   -- the process or person in this role
    why         MEDIUMTEXT      NOT NULL,
    INDEX oncekey_audit_key (scope, key_digest)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- All announced calls, each with the downstream key that the provider receives.
-- A row outlives its record, so that the provider's ledger can be compared with the calls.
CREATE TABLE IF NOT EXISTS oncekey_call (
    incarnation    VARBINARY(36)   NOT NULL,  -- of the record that made the call
    phase          VARBINARY(1024) NOT NULL,
    downstream_key VARBINARY(1024) NOT NULL,
    provider_id    VARBINARY(1024),           -- the provider's id of the call; NULL until it is reported
    scope          VARBINARY(2000) NOT NULL,
    `key`          VARBINARY(1024) NOT NULL,
    operation      VARBINARY(1024) NOT NULL,
    at             BIGINT          NOT NULL,
    PRIMARY KEY (incarnation, phase),
    INDEX oncekey_call_downstream_key (downstream_key),
    INDEX oncekey_call_provider_id (provider_id),
    INDEX oncekey_call_at (at)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;

-- Evidence: reports about calls, with their source and time. Rows are only added. Adding one requires no fence or version,
-- because it does not change a record. The verdict is written once, when the outcome of the call is determined.
CREATE TABLE IF NOT EXISTS oncekey_evidence (
    id             BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at             BIGINT          NOT NULL,
    source         VARBINARY(512)  NOT NULL,
    event_id       VARBINARY(1024) NOT NULL,  -- identifies repeated reports of a source
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

-- The live workers. Each updates its row with every heartbeat, and deletes it when it stops.
CREATE TABLE IF NOT EXISTS oncekey_worker (
    name       VARBINARY(1024) NOT NULL PRIMARY KEY,  -- of one process
    tasks      MEDIUMTEXT      NOT NULL,              -- the tasks that it runs, as a JSON array of names
    started_at BIGINT          NOT NULL,
    seen_at    BIGINT          NOT NULL,              -- the last heartbeat, by the store's clock
    every      BIGINT          NOT NULL,              -- the interval of its heartbeats
    calls      MEDIUMTEXT      NOT NULL               -- the unannounced calls of INLINE handlers: {operation: [name]}
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, CHARACTER SET = utf8mb4, COLLATE = utf8mb4_bin;
