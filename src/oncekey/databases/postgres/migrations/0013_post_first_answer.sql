-- Older code calls `enter`. Run it when none is left.

DROP FUNCTION oncekey.enter(bigint, integer, integer, bytea, bytea, bigint, integer, integer);
