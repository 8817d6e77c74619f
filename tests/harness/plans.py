"""How PostgreSQL answers a statement of the store, and whether an index serves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psycopg import sql

from oncekey.databases.placeholders import numbered
from oncekey.databases.postgres.store import PostgresStore


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A plan's nodes, from the top."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def explained(
    connection: Any, name: str, params: Mapping[str, Any], *, analyze: bool = False
) -> list[Mapping[str, Any]]:
    """The nodes of the plan for a named statement; `analyze` runs it, too."""
    said = numbered(PostgresStore()._statements._commands[name])
    values = said.arguments({**params, "now": None})
    connection.execute(f"PREPARE one ({', '.join(['unknown'] * len(values))}) AS {said.text}")
    literals = ", ".join("NULL" if value is None else sql.quote(value) for value in values)
    how = "FORMAT JSON, ANALYZE" if analyze else "FORMAT JSON"
    try:
        [[[plan]]] = connection.execute(f"EXPLAIN ({how}) EXECUTE one({literals})").fetchall()
    finally:
        connection.execute("DEALLOCATE one")
    return list(nodes(plan["Plan"]))


def check_plan(plan: list[Mapping[str, Any]], indexes: set[str]) -> None:
    """Refuse a plan that does without one of the indexes, or reads a table from end to end."""
    used = {node.get("Index Name") for node in plan}
    assert indexes <= used, f"{indexes - used} not used"
    scanned = {node.get("Relation Name") for node in plan if node["Node Type"] == "Seq Scan"}
    assert scanned == set(), f"{scanned} read whole"
