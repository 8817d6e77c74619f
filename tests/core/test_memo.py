"""The memo: a resumed handler is told what it did, or is stopped; what it did is written down without loss."""

from __future__ import annotations

import json
from collections import OrderedDict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from harness.each import each
from oncekey.core import memo
from oncekey.core.errors import ConfigurationError, ReplayDivergedError, ResultNotStorableError
from oncekey.core.memo import FINISHED, LONGEST_NAME, STARTED, Script, decode, digest_of, encode, recovery_point
from oncekey.core.model import EntryKind, MemoEntry

PHASE, CALL, VALUE = EntryKind.PHASE, EntryKind.CALL, EntryKind.VALUE
ORDER = MemoEntry("order", PHASE, "1")
CHARGE = MemoEntry("charge", CALL, '"ch_1"')
AT = MemoEntry("at", VALUE, "2")
STORED = (ORDER, CHARGE, AT)
LIMIT = 10_000


def replayed(*steps: tuple[str, EntryKind], stored=STORED) -> Script:
    script = Script(stored)
    for name, kind in steps:
        script.ask(name, kind)
    return script


class TestScript:
    """H4: same names, same kinds, same order, and all of them."""

    def test_stored_steps_are_returned_in_order(self):
        script = Script(STORED)
        assert script.ask("order", PHASE) == ORDER
        assert script.ask("charge", CALL) == CHARGE
        assert not script.used_up
        assert script.ask("at", VALUE) == AT
        assert script.used_up
        assert script.ask("ship", CALL) is None

    def test_learned_steps_are_appended_to_the_memo(self):
        script = Script()
        assert script.ask("order", PHASE) is None
        script.learn(ORDER)
        assert script.used_up
        assert script.memo == (ORDER,)
        assert script.ask("charge", CALL) is None
        script.learn(CHARGE)
        assert script.memo == (ORDER, CHARGE)

    @pytest.mark.parametrize(
        "steps",
        [
            [("Order", PHASE)],  # renamed
            [("charge", CALL)],  # reordered, or the first one removed
            [("order", PHASE), ("at", VALUE)],  # removed from the middle
            [("order", PHASE), ("check", PHASE)],  # inserted
            [("order", CALL)],  # of another kind
            [("order", VALUE)],
            [("order", PHASE), ("charge", CALL), ("ship", CALL)],
        ],
    )
    def test_another_step_than_the_stored_one_ends_the_run(self, steps):  # F25
        *before, last = steps
        script = replayed(*before)
        with pytest.raises(ReplayDivergedError, match="the next stored step is") as diverged:
            script.ask(*last)
        assert repr(last[0]) in str(diverged.value)
        assert repr(STORED[len(before)].name) in str(diverged.value)

    @pytest.mark.parametrize("asked", range(len(STORED)))
    def test_handler_that_ends_early_leaves_steps_unused(self, asked):  # F25: N-1 code
        script = replayed(*((entry.name, entry.kind) for entry in STORED[:asked]))
        assert not script.used_up

    def test_an_empty_memo_is_used_up(self):
        assert Script().used_up

    @pytest.mark.parametrize("kind", EntryKind)
    def test_two_steps_of_one_name_are_a_mistake_of_the_handler(self, kind):  # H4
        """On the first run already: otherwise the resume finds out, when it is too late."""
        script = Script()
        script.ask("charge", CALL)
        with pytest.raises(ConfigurationError, match="give each step its own name"):
            script.ask("charge", kind)

    @pytest.mark.parametrize("name", [STARTED, FINISHED])
    def test_reserved_step_names_are_rejected(self, name):  # R114
        with pytest.raises(ConfigurationError, match="another name"):
            Script().ask(name, PHASE)

    @pytest.mark.parametrize("name", ["", "x" * (LONGEST_NAME + 1)])
    def test_step_name_length_is_limited(self, name):  # R118
        with pytest.raises(ConfigurationError, match="1 to 100"):
            Script().ask(name, PHASE)
        assert Script().ask("x" * LONGEST_NAME, PHASE) is None


def test_the_recovery_point_is_the_last_finished_step():  # R114
    assert recovery_point(()) == "started"
    assert [recovery_point(STORED[:length]) for length in (1, 2, 3)] == ["order", "charge", "at"]


class Point(NamedTuple):
    x: int
    y: Decimal


BERLIN = datetime(2026, 7, 1, 12, 30, 0, 123456, tzinfo=ZoneInfo("Europe/Berlin"))
SAME = [
    None,
    True,
    False,
    0,
    -(2**80),
    1.5,
    -0.0,
    1e300,
    "",
    "naïve \x00 \U0001f600 \"quoted\" 'text' \\",
    [],
    {},
    [1, [2, [3, None]]],
    {"a": {"b": [{"c": 1}]}},
    Decimal("0.10"),
    Decimal("-1E+30"),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001  (a handler may have one, and gets the same back)
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    date(2026, 2, 28),
    timedelta(days=-3, microseconds=1),
    timedelta.max,
    UUID(int=7),
    b"",
    b"\x00\xff raw",
    {"when": date(2026, 1, 1), "amounts": [Decimal("9.99"), {"id": UUID(int=1), "raw": b"x"}]},
    {"$": "decimal", "v": "1"},
    {"$": "rejected", "v": 1},
    {"$": {"$": {"$": b"deep"}}, "other": Decimal(1)},
    {"$": None},
    {"v": 1},
    {"": 0, "b": 1, "a": 2},
]


class TestCodec:
    """H1: what comes back is what was given, in value and in type, on the first run and on every other."""

    @each("value", SAME)
    def test_value_round_trips_with_its_type(self, value):  # F26
        there = decode(encode(value, LIMIT))
        assert there == value
        assert type(there) is type(value)
        assert repr(there) == repr(value)  # -0.0 and 0.10, which are equal to others
        assert encode(there, LIMIT) == encode(value, LIMIT)

    def test_an_instant_keeps_its_offset(self):
        there = decode(encode(BERLIN, LIMIT))
        assert there == BERLIN
        assert there.utcoffset() == timedelta(hours=2)

    @pytest.mark.parametrize(
        ("value", "there"),
        [
            ((1, (2, 3)), [1, [2, 3]]),
            (Point(1, Decimal("2.0")), [1, Decimal("2.0")]),
            (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
            (MappingProxyType({"$": (1,)}), {"$": [1]}),
            (EntryKind.CALL, "call"),
        ],
    )
    def test_similar_types_become_plain_data(self, value, there):  # H1
        assert decode(encode(value, LIMIT)) == there
        assert type(decode(encode(value, LIMIT))) is type(there)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), [float("nan")], {"a": float("inf")}])
    def test_non_finite_number_is_rejected(self, value):  # F26
        with pytest.raises(ResultNotStorableError):
            encode(value, LIMIT)

    @pytest.mark.parametrize(
        "value",
        [object(), {1: "a"}, {None: 1}, {"a": {2}}, frozenset(), 1j, range(3), [object()], ValueError("x"), "\ud800"],
    )
    def test_unsupported_type_is_rejected(self, value):  # F26
        with pytest.raises(ResultNotStorableError, match="cannot be stored"):
            encode(value, LIMIT)

    def test_self_referencing_value_is_rejected(self):
        value: list[object] = []
        value.append(value)
        with pytest.raises(ResultNotStorableError):
            encode(value, LIMIT)

    def test_the_error_quotes_no_value(self):  # R143
        with pytest.raises(ResultNotStorableError) as refused:
            encode({"card": "4242", "x": object()}, LIMIT)
        assert "4242" not in str(refused.value)

    def test_the_limit_is_in_bytes(self):  # F26
        assert encode("é" * 4, 10) == '"éééé"'
        with pytest.raises(ResultNotStorableError, match="10 bytes, and 9 are allowed"):
            encode("é" * 4, 9)
        with pytest.raises(ResultNotStorableError, match="reference"):
            encode(b"x" * (2 << 20), 256 * 1024)


class TestDigest:
    """H2: a repetition with other parameters is no repetition."""

    def test_is_the_same_for_the_same_and_short(self):
        given = {"amount": Decimal("9.99"), "to": UUID(int=1)}
        assert digest_of(given, LIMIT) == digest_of(dict(given), LIMIT)
        assert len(digest_of(given, LIMIT)) == 32

    @pytest.mark.parametrize("other", [{"amount": "9.99"}, {"amount": Decimal("9.990")}, {"amount": 9.99}, {}, None])
    def test_digest_distinguishes_values_and_types(self, other):
        assert digest_of({"amount": Decimal("9.99")}, LIMIT) != digest_of(other, LIMIT)

    def test_digest_does_not_reveal_its_input(self):
        assert "4242" not in digest_of({"card": "4242"}, LIMIT)


class TestRejected:
    """H2: the provider's final no is stored, and told from a result that looks like one."""

    @each("value", SAME)
    def test_rejection_preserves_the_value(self, value):
        entry = MemoEntry("charge", CALL, encode(value, LIMIT))
        no = memo.rejected(entry)
        assert memo.is_rejection(no)
        assert not memo.is_rejection(entry)
        assert decode(no.result) == value
        assert (no.name, no.kind) == ("charge", CALL)
        json.loads(no.result)


@pytest.mark.parametrize("name", ["a\0b", "line\nbreak", "\ud800"])
def test_a_name_that_cannot_be_stored_or_shown_is_refused(name):
    with pytest.raises(ConfigurationError, match="printable"):
        Script().ask(name, EntryKind.PHASE)
