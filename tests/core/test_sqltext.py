"""The lexer that tells one statement from the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.each import each
from oncekey.core.sqltext import LEADING, Dialect, plainly_reads, sentences

BOTH = (Dialect.SQLITE, Dialect.POSTGRES)
TRIGGER = "create trigger t after insert on a begin update b set c = case when 1 then 2 end; select 1; end"
RULE = "create rule r as on insert to a do also (insert into b values (1); insert into b values (2))"
ROUTINE = "create or replace function f() returns int begin atomic select case when true then 1 end; select 2; end"


def texts(sql: str, dialect: Dialect) -> list[str]:
    return [sentence.text for sentence in sentences(sql, dialect)]


@each("dialect", BOTH)
@each(
    ("sql", "expected"),
    [
        ("", []),
        (" ;; ; ", []),
        ("-- nothing\n/* at all */;", []),
        ("select 1", ["select 1"]),
        ("select 1;", ["select 1"]),
        ("select 1; select 2 ;\n", ["select 1", "select 2"]),
        ("select ';'; select 2", ["select ';'", "select 2"]),
        ("select 'it''s; fine'; select 2", ["select 'it''s; fine'", "select 2"]),
        ('select ";"; select """;"', ['select ";"', 'select """;"']),
        ("select 1 -- ; not here\n; select 2", ["select 1 -- ; not here", "select 2"]),
        ("select /* ; */ 1; select 2", ["select /* ; */ 1", "select 2"]),
        ("select 'never closed; select 2", ["select 'never closed; select 2"]),
        ("select 1 /* never closed; select 2", ["select 1 /* never closed; select 2"]),
        ("select case when true then 1 end; select 2", ["select case when true then 1 end", "select 2"]),
    ],
)
def test_statement_ends_common_to_both_dialects(sql, expected, dialect):
    assert texts(sql, dialect) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select [;]; select `;`; select 3", ["select [;]", "select `;`", "select 3"]),
        ("select 1 /* /* */; select 2", ["select 1 /* /* */", "select 2"]),
        ("-- one line \r only; select 1\nselect 2", ["-- one line \r only; select 1\nselect 2"]),
        (f"{TRIGGER}; select 2", [TRIGGER, "select 2"]),
        (
            "create temp trigger t after insert on a begin select 1; end; select 2",
            ["create temp trigger t after insert on a begin select 1; end", "select 2"],
        ),
    ],
)
def test_statement_ends_specific_to_sqlite(sql, expected):
    assert texts(sql, Dialect.SQLITE) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (
            "select $$;$$; select $a$ $$;$b$; $a$; select 3",
            ["select $$;$$", "select $a$ $$;$b$; $a$", "select 3"],
        ),
        ("select a$b$c; select 2 as d$b$", ["select a$b$c", "select 2 as d$b$"]),
        (r"select E'\';'; select 2", [r"select E'\';'", "select 2"]),
        (r"select '\'; select 2", [r"select '\'", "select 2"]),
        ("select 1 /* a /* b */ ; */; select 2", ["select 1 /* a /* b */ ; */", "select 2"]),
        ("select a[1]; select 2", ["select a[1]", "select 2"]),
        (f"{RULE}; select 2", [RULE, "select 2"]),
        (f"{ROUTINE}; select 2", [ROUTINE, "select 2"]),
        (
            "create function begin() returns int language sql as $$ select 1; $$; select 2",
            ["create function begin() returns int language sql as $$ select 1; $$", "select 2"],
        ),
    ],
)
def test_statement_ends_specific_to_postgres(sql, expected):
    assert texts(sql, Dialect.POSTGRES) == expected


def test_leading_tokens_are_upper_case_unless_quoted():
    (sentence,) = sentences("\ufeff/* hello */ pragma\tMain.'Journal_Mode' = 3", Dialect.SQLITE)

    assert sentence.tokens == ("PRAGMA", "MAIN", ".", "'Journal_Mode'", "=", "3")


def test_only_the_first_tokens_are_kept():
    (sentence,) = sentences("a b c d e f g h i j k", Dialect.POSTGRES)

    assert sentence.tokens == tuple("ABCDEFGH")
    assert len(sentence.tokens) == LEADING


FRAGMENTS = (
    "select 1",
    ";",
    "'",
    "''",
    '"',
    "$$",
    "$a$",
    "--",
    "\n",
    "/*",
    "*/",
    "E'",
    "\\",
    "(",
    ")",
    "[",
    "`",
    "end",
)


@each("dialect", Dialect)
@each("mark", ["E'", "'", '"', "`", "$$", "/*"])
def test_a_string_without_an_end_is_read_once(dialect, mark):
    """It was read in every way in which a string can be parted, if it ended in a backslash."""
    (found,) = sentences("SELECT " + mark + "some words " * 500 + "\\", dialect)

    assert found.tokens[0] == "SELECT"


@pytest.mark.parametrize("dialect", BOTH)
@given(parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=30))
def test_lexer_reads_any_text_to_its_end(dialect, parts):
    text = " ".join(parts)
    at = 0
    for sentence in sentences(text, dialect):
        found = text.find(sentence.text, at)
        assert found >= 0
        assert sentence.tokens
        at = found + len(sentence.text)


@pytest.mark.parametrize(
    ("sql", "reads"),
    [
        ("SELECT name FROM users WHERE token = $1", True),
        (" select count(*) from orders", True),
        ("VALUES (1)", True),
        ("SELECT id FROM orders FOR UPDATE", False),
        ("SELECT id INTO copies FROM orders", False),
        ("SELECT set_config('app.tenant', $1, true)", False),
        ("SELECT pg_advisory_xact_lock(1)", False),
        ("SELECT 1, pg_try_advisory_lock(1)", False),
        ("WITH gone AS (DELETE FROM orders RETURNING id) SELECT id FROM gone", False),
        ("INSERT INTO orders VALUES (1)", False),
    ],
)
def test_read_only_statements_are_recognised(sql: str, reads: bool) -> None:
    assert plainly_reads(sql) is reads
