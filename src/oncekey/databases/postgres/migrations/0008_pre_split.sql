-- Copies the columns that only unfinished, failed or PHASED records use to a second table, `work`, so that the row of
-- every key stays small and has no CHECK constraints. This is quick, because it reads only unfinished records. Older
-- code may still run: until 0009, triggers keep its columns and the new table equal.

CREATE TABLE oncekey.work (
    incarnation      uuid     NOT NULL PRIMARY KEY,  -- of the record that the row belongs to
    scope            text     NOT NULL,
    key              text     NOT NULL,
    memo_version     bigint   NOT NULL DEFAULT 0,  -- equal to the record's; if not, the two rows were not read together
    memo             text,                         -- the results of the finished steps, in order
    intent           text,                         -- the announced external call that has no result yet
    request          bytea,                        -- the stored request, for the completer; NULL after the settlement
    reconcile_after  bigint,
    reconcile_tries  integer  NOT NULL DEFAULT 0
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
-- Finds the records that the reconciler checks next.
CREATE INDEX work_due ON oncekey.work (reconcile_after, scope, key) WHERE reconcile_after IS NOT NULL;

-- The version of the record at which its memo or intent was last written; 0: it has neither; negative: not in `work` yet.
-- If the row of `work` has another number, it was read before the record was locked, and must not be the basis of a write.
ALTER TABLE oncekey.record ADD COLUMN memo_version bigint NOT NULL DEFAULT -1;

-- PostgreSQL parses and compiles the CHECK constraints for each statement that writes the table. The contract tests of
-- the stores cover the rules, and `oncekey doctor` finds rows that violate them. Existing rows passed, so none is read.
ALTER TABLE oncekey.record
    DROP CONSTRAINT effects_known, DROP CONSTRAINT recovery_known, DROP CONSTRAINT state_known, DROP CONSTRAINT counts_up,
    DROP CONSTRAINT completed_has_answer, DROP CONSTRAINT completed_has_no_intent, DROP CONSTRAINT answer_only_when_done,
    DROP CONSTRAINT owned_in_progress, DROP CONSTRAINT owned_only_in_progress, DROP CONSTRAINT unknown_has_ticket;

-- Locks a record, then reads it with its row of `work` in a separate statement, whose snapshot is newer than the lock.
CREATE FUNCTION oncekey.hold(in_scope text, in_key text) RETURNS SETOF oncekey.whole
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM FROM oncekey.record AS record WHERE record.scope = in_scope AND record.key = in_key FOR UPDATE;
    RETURN QUERY SELECT whole.* FROM oncekey.whole AS whole WHERE whole.scope = in_scope AND whole.key = in_key;
END
$$;

-- Copies to `work` what older code writes to the old columns. This version does not write them, so a change in them is a
-- write of older code. Otherwise they are cleared: it is a new incarnation, or the record was not in `work` before.
-- The database user of the older application has no rights on `work`: the functions run with those of the migrating user.
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

-- AFTER INSERT, not BEFORE: an INSERT that finds an existing record must not write to `work`.
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

-- Copies what this version writes to `work` to the columns that older code reads.
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

-- Copies unfinished records to `work` now; 0009 copies finished ones. Served by record_key.
UPDATE oncekey.record AS record SET memo_version = -1
WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
  AND (num_nonnulls(record.memo, record.intent, record.request, record.reconcile_after) > 0 OR record.reconcile_tries > 0);
