-- Drops `enter`, which only older code calls. Run it when no older code is left.

DROP FUNCTION oncekey.enter(bigint, integer, integer, bytea, bytea, bigint, integer, integer);
