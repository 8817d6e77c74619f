-- What the crash proof keeps beside oncekey's tables: the business, and a diary that no crash can falsify, because its
-- lines are written by triggers, in the very transactions that they tell about.

-- name: make_effect
CREATE TABLE crash_effect (
    at bigint GENERATED ALWAYS AS IDENTITY, kind text NOT NULL, key text NOT NULL, amount bigint NOT NULL,
    operation text);

-- name: make_diary
CREATE TABLE crash_diary (
    at bigint GENERATED ALWAYS AS IDENTITY, scope text NOT NULL, key text NOT NULL, incarnation text NOT NULL,
    state text, fence bigint NOT NULL, version bigint NOT NULL, fingerprint text NOT NULL, lease_until bigint,
    expires_at bigint NOT NULL, ttl bigint NOT NULL, steps bigint NOT NULL);

-- name: make_parcel
CREATE TABLE crash_parcel (id text NOT NULL, key text NOT NULL, kind text NOT NULL);

-- name: make_function
CREATE FUNCTION crash_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO crash_diary (
            scope, key, incarnation, state, fence, version, fingerprint, lease_until, expires_at, ttl, steps)
        VALUES (
            OLD.scope, OLD.key, OLD.incarnation, NULL, OLD.fence, OLD.version, OLD.fingerprint, OLD.lease_until,
            OLD.expires_at, OLD.ttl, 0);
    ELSE
        INSERT INTO crash_diary (
            scope, key, incarnation, state, fence, version, fingerprint, lease_until, expires_at, ttl, steps)
        VALUES (
            NEW.scope, NEW.key, NEW.incarnation, NEW.state, NEW.fence, NEW.version, NEW.fingerprint, NEW.lease_until,
            NEW.expires_at, NEW.ttl, COALESCE((
                SELECT json_array_length(work.memo::json) FROM oncekey.work AS work
                WHERE work.incarnation = NEW.incarnation), 0));
    END IF;
    RETURN NULL;
END
$$;

-- name: on_write
CREATE TRIGGER crash_write AFTER INSERT OR UPDATE OR DELETE ON oncekey.record
    FOR EACH ROW EXECUTE FUNCTION crash_write();

-- name: make_parcel_function
CREATE FUNCTION crash_put() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO crash_parcel (id, key, kind) VALUES (NEW.downstream_key, NEW.key, NEW.kind);
    RETURN NULL;
END
$$;

-- name: on_parcel
CREATE TRIGGER crash_put AFTER INSERT ON oncekey.outbox FOR EACH ROW EXECUTE FUNCTION crash_put();

-- name: insert_effect
INSERT INTO crash_effect (kind, key, amount, operation) VALUES ($1, $2, $3, $4);

-- name: insert_effect_psycopg
INSERT INTO crash_effect (kind, key, amount, operation) VALUES (%s, %s, %s, %s);

-- name: effects
SELECT at, kind, key, amount, operation FROM crash_effect WHERE key = :key ORDER BY at;

-- name: diary
SELECT * FROM crash_diary WHERE key = :key ORDER BY at;

-- name: committed
SELECT DISTINCT id, kind FROM crash_parcel WHERE key = :key;

-- name: waiting
SELECT downstream_key AS id FROM oncekey.outbox WHERE key = :key;

-- name: dead
SELECT downstream_key AS id FROM oncekey.dead_letter WHERE key = :key;

-- name: records
SELECT scope, key, incarnation::text AS incarnation, state, fingerprint, response_status, response_body, last_error,
       reconcile_after, intent, memo
FROM oncekey.whole WHERE key = :key;

-- name: lose_record
DELETE FROM oncekey.record WHERE key = :key;

-- name: lose_effects
DELETE FROM crash_effect WHERE key = :key;

-- name: lose_parcels
DELETE FROM oncekey.outbox WHERE key = :key;

-- name: lose_diary
DELETE FROM crash_diary WHERE key = :key;

-- name: lose_put
DELETE FROM crash_parcel WHERE key = :key;
