-- What only unfinished, failed or phased work has gets a row of its own, so that the row that every key has stays small and
-- is written without a check. Quick: nothing is read but unfinished records. Older code may go on beside it: until 0009 two
-- triggers keep its columns and the new table equal.

CREATE TABLE oncekey.work (
    incarnation      uuid     NOT NULL PRIMARY KEY,  -- the life of the key that it belongs to
    scope            text     NOT NULL,
    key              text     NOT NULL,
    memo_version     bigint   NOT NULL DEFAULT 0,  -- as the record has it: else the two were not read together
    memo             text,                         -- finished phases, in order
    intent           text,                         -- the announced outside call that has no result yet
    request          bytea,                        -- as a completer repeats it; gone with the settlement
    reconcile_after  bigint,
    reconcile_tries  integer  NOT NULL DEFAULT 0
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
-- Where a reconciler looks.
CREATE INDEX work_due ON oncekey.work (reconcile_after, scope, key) WHERE reconcile_after IS NOT NULL;

-- The version of the record at which its memo or intent was last written; 0: it has neither; below: no row of its own yet.
-- Who finds a row of `work` that does not fit read it before the record was locked, and must not write by it.
ALTER TABLE oncekey.record ADD COLUMN memo_version bigint NOT NULL DEFAULT -1;

-- Every statement that writes the table reads and compiles its checks anew. They are in the contract that every store must
-- pass, and `oncekey doctor` looks for rows that break them. Older rows passed stricter ones, so none is read.
ALTER TABLE oncekey.record
    DROP CONSTRAINT effects_known, DROP CONSTRAINT recovery_known, DROP CONSTRAINT state_known, DROP CONSTRAINT counts_up,
    DROP CONSTRAINT completed_has_answer, DROP CONSTRAINT completed_has_no_intent, DROP CONSTRAINT answer_only_when_done,
    DROP CONSTRAINT owned_in_progress, DROP CONSTRAINT owned_only_in_progress, DROP CONSTRAINT unknown_has_ticket;

-- The record, locked, with what belongs to it: a statement of its own reads both after the lock was got.
CREATE FUNCTION oncekey.hold(in_scope text, in_key text) RETURNS SETOF oncekey.whole
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key FOR UPDATE;
    RETURN QUERY SELECT whole.* FROM oncekey.whole AS whole WHERE whole.scope = in_scope AND whole.key = in_key;
END
$$;

-- What older code writes into its columns goes to `work`, too. What this version writes leaves them as they are, so they
-- tell who wrote. A record of another life, or one that had no row of its own yet, starts with nothing in them.
-- The older application's user has no rights on the new table, so these functions have those of whoever migrates.
CREATE FUNCTION oncekey.split_old() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.memo_version >= 0 AND
       (NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after, NEW.reconcile_tries) IS NOT DISTINCT FROM
       (OLD.memo, OLD.intent, OLD.request, OLD.reconcile_after, OLD.reconcile_tries)
    THEN
        NEW.memo := NULL;
        NEW.intent := NULL;
        NEW.request := NULL;
        NEW.reconcile_after := NULL;
        NEW.reconcile_tries := 0;
        RETURN NEW;
    END IF;
    NEW.memo_version := CASE WHEN NEW.memo IS NULL AND NEW.intent IS NULL THEN 0 ELSE NEW.version END;
    IF TG_OP = 'UPDATE' THEN
        DELETE FROM oncekey.work AS work WHERE work.incarnation IN (OLD.incarnation, NEW.incarnation);
    END IF;
    IF num_nonnulls(NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after) > 0 OR NEW.reconcile_tries > 0 THEN
        INSERT INTO oncekey.work (
            incarnation, scope, key, memo_version, memo, intent, request, reconcile_after, reconcile_tries)
        VALUES (NEW.incarnation, NEW.scope, NEW.key, NEW.memo_version, NEW.memo, NEW.intent, NEW.request,
                NEW.reconcile_after, NEW.reconcile_tries);
    END IF;
    RETURN NEW;
END
$$;

-- Not before an insert: one that finds the key taken must leave no trace.
CREATE TRIGGER split_inserted AFTER INSERT ON oncekey.record FOR EACH ROW
WHEN (pg_trigger_depth() = 0 AND NEW.memo_version < 0 AND NEW.request IS NOT NULL)
EXECUTE FUNCTION oncekey.split_old();

CREATE TRIGGER split_updated BEFORE UPDATE ON oncekey.record FOR EACH ROW
WHEN (pg_trigger_depth() = 0
      AND (NEW.memo_version < 0 OR OLD.memo_version < 0 OR NEW.incarnation <> OLD.incarnation
           OR (NEW.memo, NEW.intent, NEW.request, NEW.reconcile_after, NEW.reconcile_tries) IS DISTINCT FROM
              (OLD.memo, OLD.intent, OLD.request, OLD.reconcile_after, OLD.reconcile_tries)))
EXECUTE FUNCTION oncekey.split_old();

CREATE FUNCTION oncekey.split_removed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    DELETE FROM oncekey.work AS work WHERE work.incarnation = OLD.incarnation;
    RETURN NULL;
END
$$;

CREATE TRIGGER split_removed AFTER DELETE ON oncekey.record FOR EACH ROW EXECUTE FUNCTION oncekey.split_removed();

-- What this version writes to `work` goes to the columns that older code reads.
CREATE FUNCTION oncekey.split_new() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        UPDATE oncekey.record AS record
        SET memo = NULL, intent = NULL, request = NULL, reconcile_after = NULL, reconcile_tries = 0
        WHERE record.scope = OLD.scope AND record.key = OLD.key AND record.incarnation = OLD.incarnation;
    ELSE
        UPDATE oncekey.record AS record
        SET memo = NEW.memo, intent = NEW.intent, request = NEW.request, reconcile_after = NEW.reconcile_after,
            reconcile_tries = NEW.reconcile_tries
        WHERE record.scope = NEW.scope AND record.key = NEW.key AND record.incarnation = NEW.incarnation;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER split_written AFTER INSERT OR UPDATE OR DELETE ON oncekey.work FOR EACH ROW
WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION oncekey.split_new();

-- What is unfinished gets its row now, finished records by 0009. Served by record_key.
UPDATE oncekey.record AS record SET memo_version = -1
WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
  AND (num_nonnulls(record.memo, record.intent, record.request, record.reconcile_after) > 0 OR record.reconcile_tries > 0);
