"""Which migrations are missing, and with which of them code may start."""

from __future__ import annotations

import re

import pytest

from oncekey.core.migrations import (
    ALONE,
    Applied,
    Migration,
    MigrationPhase,
    MigrationState,
    changed,
    objection,
    ordered,
    plan,
    status,
)


def migration(number: int, phase: str = "pre", name: str = "thing", text: str = "SELECT 1;") -> Migration:
    return Migration.read(f"{number:04}_{phase}_{name}.sql", text)


def applied(one: Migration, **changes) -> Applied:
    fields = {"number": one.number, "phase": one.phase, "name": one.name, "checksum": one.checksum}
    return Applied(**{**fields, **changes})


ONE, TWO, THREE, FOUR = migration(1), migration(2, "post"), migration(3), migration(4, "post")
KNOWN = (ONE, TWO, THREE, FOUR)


def labels(migrations) -> list[str]:
    return [one.label for one in migrations]


def test_file_name_contains_number_phase_and_name():
    one = Migration.read("0042_post_drop_it.sql", "DROP TABLE x;")

    assert (one.number, one.phase, one.name, one.label) == (42, MigrationPhase.POST, "drop_it", "0042_post_drop_it")
    assert "DROP" not in repr(one)


@pytest.mark.parametrize(
    "file", ["1_pre_x.sql", "0001_now_x.sql", "0001_pre_.sql", "0001_pre_X.sql", "0001_pre_x.txt", "0001pre_x.sql"]
)
def test_any_other_name_is_refused(file):
    with pytest.raises(ValueError, match=r"NNNN_pre_name\.sql"):
        Migration.read(file, "")


def test_line_ends_and_comments_do_not_change_a_checksum_and_anything_else_does():
    for same in ("a\r\nb", "-- it's a\na\n\nb\n", "a  -- 'b'\nb"):
        assert migration(1, text="a\nb").checksum == migration(1, text=same).checksum, same
    for other in ("a\n b", "a b", "-- a\nb", "a'-- b'\nb"):
        assert migration(1, text="a\nb").checksum != migration(1, text=other).checksum, other


def test_a_former_checksum_of_the_same_migration_is_recognised():
    known = Migration.read("0001_pre_thing.sql", "SELECT 1;", "f" * 64)

    for checksum, state in ((known.checksum, "applied"), ("f" * 64, "applied"), ("0" * 64, "changed")):
        assert [one.state for one in status([known], [applied(known, checksum=checksum)])] == [state]
    assert [one.state for one in status([ONE], [applied(ONE, checksum="f" * 64)])] == ["changed"]


def test_numbers_have_no_gaps_and_no_doubles():
    assert labels(ordered([TWO, ONE])) == ["0001_pre_thing", "0002_post_thing"]
    for wrong in ([ONE, THREE], [ONE, migration(1, name="other")], [TWO]):
        with pytest.raises(ValueError, match="numbered"):
            ordered(wrong)


@pytest.mark.parametrize(
    ("there", "everything", "safe_now"),
    [
        ((), [1, 2, 3, 4], [1]),
        ((ONE,), [2, 3, 4], []),
        ((ONE, TWO), [3, 4], [3]),
        ((ONE, TWO, THREE), [4], []),
        (KNOWN, [], []),
        ((ONE, TWO, THREE, FOUR, migration(5)), [], []),
    ],
)
def test_plan_lists_pending_migrations(there, everything, safe_now):
    there = [applied(one) for one in there]

    assert [one.number for one in plan(KNOWN, there)] == everything
    assert [one.number for one in plan(KNOWN, there, only=MigrationPhase.PRE)] == safe_now


def test_status_lists_known_and_unknown_migrations():
    other = applied(TWO, checksum="0" * 64)
    unknown = applied(migration(7))

    entries = status(KNOWN, [applied(ONE), other, unknown])

    assert [(entry.migration.number, entry.state) for entry in entries] == [
        (1, MigrationState.APPLIED),
        (2, MigrationState.CHANGED),
        (3, MigrationState.PENDING),
        (4, MigrationState.PENDING),
        (7, MigrationState.UNKNOWN),
    ]


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ([], "no oncekey tables.*migrate up"),
        ([ONE, TWO], "lacks the migration 0003_pre_thing.*migrate up"),
        ([ONE, TWO, THREE], None),  # a `post` that is still to come does not keep code from running
        (KNOWN, None),
        ([*KNOWN, migration(5)], None),  # a newer `pre` is safe under this code: a rolling deploy
        ([*KNOWN, migration(5), migration(6, "post")], "0006_post_thing.*update oncekey"),
        ([applied(ONE, checksum="0" * 64), TWO, THREE], "0001_pre_thing is not the one"),
        ([applied(ONE, name="other"), TWO, THREE], "0001_pre_thing is not the one"),
        ([applied(ONE, phase=MigrationPhase.POST), TWO, THREE], "0001_pre_thing is not the one"),
    ],
)
def test_code_starts_only_with_compatible_migrations(there, sentence):
    wrong = objection(KNOWN, there)

    if sentence is None:
        assert wrong is None
    else:
        assert wrong is not None
        assert re.search(sentence, wrong)


def test_store_without_migrations_can_start():
    assert objection((), ()) is None
    assert changed((), ()) is None


def test_a_pre_that_stands_alone_does_not_wait_for_a_post():
    first, post = Migration.read("0001_pre_a.sql", "-- a"), Migration.read("0002_post_b.sql", ALONE)
    builds, alone = Migration.read("0003_pre_c.sql", "-- c"), Migration.read("0004_pre_d.sql", f"{ALONE}\n-- d")
    known = (first, post, builds, alone)
    assert plan(known, (), only=MigrationPhase.PRE) == (first, alone)
    assert plan(known, ()) == known
    assert objection(known, (first, alone)) is not None  # it lacks what builds on the post
    assert objection((first, post, alone), (first, alone)) is None
    assert plan(known, (first, alone)) == (post, builds)
