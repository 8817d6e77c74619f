-- What the crash proof keeps beside oncekey's tables: the business, and a diary that no crash can falsify, because its
-- lines are written by triggers, in the very transactions that they tell about.

-- name: make_effect
CREATE TABLE crash_effect (
    at INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, amount INTEGER NOT NULL, operation TEXT);

-- name: make_diary
CREATE TABLE crash_diary (
    at INTEGER PRIMARY KEY, scope TEXT NOT NULL, key TEXT NOT NULL, incarnation TEXT NOT NULL, state TEXT,
    fence INTEGER NOT NULL, version INTEGER NOT NULL, fingerprint TEXT NOT NULL, lease_until INTEGER,
    expires_at INTEGER NOT NULL, ttl INTEGER NOT NULL, steps INTEGER NOT NULL);

-- name: make_parcel
CREATE TABLE crash_parcel (id TEXT NOT NULL, key TEXT NOT NULL, kind TEXT NOT NULL);

-- name: on_insert
CREATE TRIGGER crash_on_insert AFTER INSERT ON oncekey_record BEGIN
    INSERT INTO crash_diary (
        scope, key, incarnation, state, fence, version, fingerprint, lease_until, expires_at, ttl, steps)
    VALUES (
        NEW.scope, NEW.key, NEW.incarnation, NEW.state, NEW.fence, NEW.version, NEW.fingerprint, NEW.lease_until,
        NEW.expires_at, NEW.ttl, COALESCE(json_array_length(NEW.memo), 0));
END;

-- name: on_update
CREATE TRIGGER crash_on_update AFTER UPDATE ON oncekey_record BEGIN
    INSERT INTO crash_diary (
        scope, key, incarnation, state, fence, version, fingerprint, lease_until, expires_at, ttl, steps)
    VALUES (
        NEW.scope, NEW.key, NEW.incarnation, NEW.state, NEW.fence, NEW.version, NEW.fingerprint, NEW.lease_until,
        NEW.expires_at, NEW.ttl, COALESCE(json_array_length(NEW.memo), 0));
END;

-- name: on_delete
CREATE TRIGGER crash_on_delete AFTER DELETE ON oncekey_record BEGIN
    INSERT INTO crash_diary (
        scope, key, incarnation, state, fence, version, fingerprint, lease_until, expires_at, ttl, steps)
    VALUES (
        OLD.scope, OLD.key, OLD.incarnation, NULL, OLD.fence, OLD.version, OLD.fingerprint, OLD.lease_until,
        OLD.expires_at, OLD.ttl, 0);
END;

-- name: on_parcel
CREATE TRIGGER crash_on_parcel AFTER INSERT ON oncekey_outbox BEGIN
    INSERT INTO crash_parcel (id, key, kind) VALUES (NEW.downstream_key, NEW.key, NEW.kind);
END;

-- name: insert_effect
INSERT INTO crash_effect (kind, key, amount, operation) VALUES (?, ?, ?, ?);

-- name: effects
SELECT at, kind, key, amount, operation FROM crash_effect WHERE key = :key ORDER BY at;

-- name: diary
SELECT * FROM crash_diary WHERE key = :key ORDER BY at;

-- name: committed
SELECT DISTINCT id, kind FROM crash_parcel WHERE key = :key;

-- name: waiting
SELECT downstream_key AS id FROM oncekey_outbox WHERE key = :key;

-- name: dead
SELECT downstream_key AS id FROM oncekey_dead_letter WHERE key = :key;

-- name: records
SELECT scope, key, incarnation, state, fingerprint, response_status, response_body, last_error, reconcile_after, intent,
       memo
FROM oncekey_record WHERE key = :key;

-- name: lose_record
DELETE FROM oncekey_record WHERE key = :key;

-- name: lose_effects
DELETE FROM crash_effect WHERE key = :key;

-- name: lose_parcels
DELETE FROM oncekey_outbox WHERE key = :key;

-- name: lose_diary
DELETE FROM crash_diary WHERE key = :key;

-- name: lose_put
DELETE FROM crash_parcel WHERE key = :key;
