from __future__ import annotations

import psycopg
import pytest

from oncekey.databases.placeholders import Numbered, marked, numbered, parted, pyformat
from oncekey.databases.postgres.store import PostgresStore

UNTOUCHED = (
    "SELECT 1::bigint, x :: text",
    "SELECT ':a', 'it''s :b', E'\\':c', e'\\\\' || ':d'",
    'SELECT ":a" FROM "t"":b"',
    "SELECT 1 -- :a and ':b\n+ 2",
    "SELECT 1 /* :a /* ':b */ :c */ + 2",
    "SELECT $$ :a $$, $tag$ :b $$ :c $tag$",
    "SELECT a[1:2], 10:3",
    "SELECT 'open :a",
    "SELECT 1 /* open :a",
)


@pytest.mark.parametrize("text", UNTOUCHED)
def test_placeholders_in_literals_and_comments_are_ignored(text):
    assert numbered(text) == Numbered(text, ())
    assert pyformat(text) == text
    assert parted(text) == (text, ())
    question, values = marked(text)
    assert (question, values({"a": 1, "b": 2, "c": 3, "d": 4, "x": 5})) == (text, ())


def test_a_statement_is_cut_at_its_placeholders():
    assert parted("CALL f(:a::bigint, ':b', :a)") == ("CALL f(", (("a", "::bigint, ':b', "), ("a", ")")))


def test_named_placeholders_are_converted_for_each_library():
    text = "SELECT :now::bigint, ':now' -- :now\n, :scope || :now, table1'x', :a1_b"
    assert pyformat(text) == "SELECT %(now)s::bigint, ':now' -- :now\n, %(scope)s || %(now)s, table1'x', %(a1_b)s"
    found = numbered(text)
    assert found.text == "SELECT $1::bigint, ':now' -- :now\n, $2 || $1, table1'x', $3"
    assert found.names == ("now", "scope", "a1_b")
    assert found.arguments({"a1_b": 3, "now": 1, "scope": "s", "more": None}) == [1, "s", 3]


@pytest.mark.parametrize(
    ("text", "question", "values"),
    [
        ("SELECT :b, ':b', :a || :b", "SELECT ?, ':b', ? || ?", (2, 1, 2)),
        ("SELECT :a", "SELECT ?", (1,)),
    ],
)
def test_a_mark_stands_for_each_placeholder_also_of_the_same_name(text, question, values):
    found, in_order = marked(text)
    assert (found, in_order({"a": 1, "b": 2, "more": 3})) == (question, values)


def test_word_before_a_literal_is_not_an_escape_prefix():
    # In `like'\':x` the text ends at the second quote: only a lone e makes the backslash an escape.
    assert numbered("SELECT a like'\\':x").names == ("x",)
    assert numbered("SELECT e'\\':x").names == ()


def test_percent_signs_survive_psycopg():
    assert pyformat("SELECT '50%', x % :n -- 100%") == "SELECT '50%%', x %% %(n)s -- 100%%"


def test_both_placeholder_styles_give_the_same_result(postgres_dsn):
    text = "SELECT '100% :n' AS a, 7 % :n::int AS b, $$:n$$ AS c, :n::int AS d /* :n% */"
    wanted = ("100% :n", 1, ":n", 3)
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute(pyformat(text), {"n": 3}).fetchone() == wanted
        with psycopg.RawCursor(connection) as cursor:
            said = numbered(text)
            assert cursor.execute(said.text, said.arguments({"n": 3})).fetchone() == wanted


def test_a_statement_is_translated_once():
    for text in PostgresStore()._statements._commands.values():
        assert pyformat(text) is pyformat(text)
        assert numbered(text) is numbered(text)
