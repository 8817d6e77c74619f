"""No guard of a SQL statement is there for nothing: without any one of them some test fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.guards import guards
from harness.mutating import functions, matches, mutants, tried, wanted
from harness.unmutated import UNMUTATED, VERSIONED

ROOT = Path(__file__).parents[2]
DIALECTS = ("sqlite", "postgres")
EVERY = {"sqlite": 1, "postgres": 12}
"""One mutant of so many is tried here; `make mutants` tries all."""


def texts(statement):
    return [guard.text for guard in guards(statement)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_sql_mutant_is_caught(dialect, tmp_path):
    report = tmp_path / "mutants.jsonl"
    every = EVERY[dialect]
    command = [sys.executable, "-m", "harness.mutating", dialect, "--every", str(every), "--report", str(report)]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "tests"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-20000:] + ran.stderr[-2000:]
    assert [(one.name, one.listed) for one in tried(report)] == [
        (one.name, one.listed) for one in wanted(dialect)[::every]
    ]


def test_every_exception_is_one_of_a_mutant():
    every = [one for dialect in DIALECTS for one in mutants(dialect)]
    assert [pattern for pattern in (*UNMUTATED, *VERSIONED) if not any(matches(pattern, one) for one in every)] == []


def test_a_statement_that_writes_has_guards():
    """Of the statements that change a row, those without a guard are named here."""
    for dialect in DIALECTS:
        guarded = {one.statement for one in mutants(dialect)}
        assert {"renew", "settle_completed", "take_over", "due", "sent", "purge_expired", "operator_bust"} <= guarded


def test_the_functions_are_those_of_a_migrated_database(tables_dsn):
    import psycopg

    with psycopg.connect(tables_dsn) as connection:
        rows = connection.execute("SELECT proname FROM pg_proc WHERE pronamespace = 'oncekey'::regnamespace").fetchall()
    assert sorted(functions("oncekey.databases.postgres")) == sorted(name for (name,) in rows)


class TestGuards:
    def test_each_operand_of_and(self):
        assert texts("DELETE FROM t WHERE a = 1 AND b <= :b RETURNING id") == ["a = 1", "b <= :b"]

    def test_or_yields_itself_and_nested_conditions(self):
        condition = "(a = 1 AND b = 2) OR c = 3"
        assert texts(f"SELECT 1 FROM t WHERE {condition}") == [condition, "a = 1", "b = 2"]

    def test_group_yields_itself_and_nested_conditions(self):
        assert texts("SELECT 1 FROM t WHERE a AND (b OR (c AND d))") == ["a", "(b OR (c AND d))", "c", "d"]

    def test_branches_of_a_case(self):
        case = "CASE WHEN a THEN b AND c ELSE d END"
        assert texts(f"UPDATE t SET x = 1 WHERE {case} AND e") == [case, "b", "c", "e"]

    def test_case_expression_yields_no_guard(self):
        assert texts("UPDATE t SET x = CASE WHEN a AND b THEN 1 END WHERE c = 2") == ["c = 2"]

    def test_between_is_one_condition(self):
        assert texts("SELECT 1 FROM t WHERE a BETWEEN 1 AND 2 AND b") == ["a BETWEEN 1 AND 2", "b"]

    def test_joins_and_subqueries(self):
        text = "SELECT 1 FROM t LEFT JOIN s ON s.a = t.a AND s.b WHERE EXISTS (SELECT FROM u WHERE u.c = t.c AND u.d)"
        assert texts(text)[:2] == ["s.a = t.a", "s.b"]
        assert texts(text)[-2:] == ["u.c = t.c", "u.d"]

    def test_on_conflict_is_not_parsed_as_join(self):
        assert texts("INSERT INTO t SELECT 1 WHERE a = 1 ON CONFLICT (x) DO UPDATE SET y = 1 WHERE t.z") == [
            "a = 1",
            "t.z",
        ]

    def test_distinct_from_is_one_condition(self):
        assert texts("SELECT 1 FROM t WHERE a IS NOT DISTINCT FROM b AND c") == ["a IS NOT DISTINCT FROM b", "c"]

    def test_comments_and_strings_hide_nothing(self):
        assert texts("SELECT 1 -- WHERE a AND b\nFROM t WHERE c = 'x AND y' -- AND d\n AND e") == ["c = 'x AND y'", "e"]

    def test_function_body_yields_conditions(self):
        body = "BEGIN IF a AND NOT b THEN PERFORM FROM t WHERE c = d; RETURN FOUND; END IF; END"
        assert texts(f"CREATE FUNCTION f() RETURNS boolean LANGUAGE plpgsql AS $$ {body} $$;") == [
            "a",
            "NOT b",
            "c = d",
        ]

    def test_each_mutant_drops_one_condition(self):
        text = "DELETE FROM t WHERE a = 1 AND b = 2"
        assert [guard.dropped(text) for guard in guards(text)] == [
            "DELETE FROM t WHERE true AND b = 2",
            "DELETE FROM t WHERE a = 1 AND true",
        ]
