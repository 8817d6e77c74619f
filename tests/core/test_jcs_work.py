"""The work of canonicalisation is bounded by the size of a body, whatever is in it: counted in calls."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.canonical import jcs
from oncekey.canonical.jcs import BigInts, canonical_json, canonical_number
from oncekey.core.errors import BodyInvalidError

SIZE = 60_000


def calls_of(work: Callable[[], object]) -> int:
    """How many functions of the module were called."""
    count = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename == jcs.__file__

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def filled(make: Callable[[random.Random], str], first: str = "") -> bytes:
    """An array of about SIZE bytes."""
    draw, items, size = random.Random(8785), [first] if first else [], 0
    while size < SIZE:
        items.append(make(draw))
        size += len(items[-1]) + 1
    return f"[{','.join(items)}]".encode()


BODIES = {
    "one exponent": filled(lambda _: "1e20"),
    "small": filled(lambda _: "1e-9"),
    "many exponents": filled(lambda draw: f"{draw.randrange(1, 99)}e-{draw.randrange(10, 99)}"),
    "large": filled(lambda draw: f"{draw.randrange(1, 99)}E{draw.randrange(17, 300)}"),
    "with an escape": filled(lambda _: "1e21", '"\\u0041"'),
    "with an emoji": filled(lambda _: "1", '"\U0001f600"'),
    "both": filled(lambda _: "1e21", '"\U0001f600\\u0041"'),
    "long fractions": filled(lambda draw: repr(draw.random())),
    "long digits": filled(lambda draw: f"0.{draw.randrange(10**20, 10**21)}"),
    "long integers": filled(lambda draw: str(draw.randrange(10**22, 10**23))),
    "subnormal, and few": filled(lambda draw: f'"{"x" * 30}",{draw.randrange(1, 9)}e-310'),
    "a name twice at the end": filled(lambda _: "1e20").removesuffix(b"]") + b',{"a":1,"a":1}]',
}


@pytest.mark.parametrize("name", BODIES)
def test_there_is_at_most_one_call_for_each_byte(name: str) -> None:
    body = BODIES[name]

    def work() -> None:
        try:
            canonical_json(body)
        except BodyInvalidError:
            assert name == "a name twice at the end"

    jcs._text_of.cache_clear()
    assert calls_of(work) <= len(body)


@pytest.mark.parametrize("first", ["1", '"\\u0041"', '"\U0001f600"'])
@pytest.mark.parametrize("literal", ["1e-400", "3e-324", "0.1E-310"])
def test_a_body_of_numbers_that_no_double_holds_is_refused(literal: str, first: str) -> None:
    many = filled(lambda _: literal, first)

    def work() -> None:
        with pytest.raises(BodyInvalidError, match="too many numbers that are too close to zero"):
            canonical_json(many)

    assert calls_of(work) <= len(many)
    some = f"[{first},{','.join([literal] * 1_000)}]".encode()
    assert canonical_json(some).endswith(f",{canonical_number(literal)}]".encode())


digits = st.text("0123456789", min_size=1, max_size=18)


@given(st.sampled_from(["", "-"]), digits, digits, st.integers(-330, 310), st.sampled_from(["e", "E", ""]))
def test_every_way_writes_a_number_alike(sign: str, whole: str, fraction: str, exponent: int, mark: str) -> None:
    """The ways with C, with an escape and with an emoji, beside the definition."""
    literal = f"{sign}{int(whole)}.{fraction}{f'{mark}{exponent}' if mark else ''}"
    for big_ints in BigInts:
        try:
            text = canonical_number(literal, big_ints)
        except BodyInvalidError:
            with pytest.raises(BodyInvalidError):
                canonical_json(f"[{literal}]".encode(), big_ints=big_ints)
            continue
        for before, after in (("", ""), ('"\\u0041",', '"A",'), ('"\U0001f600",', '"\U0001f600",')):
            found = canonical_json(f"[{before}{literal}]".encode(), big_ints=big_ints)
            assert found == f"[{after}{text}]".encode()


def test_names_beyond_the_basic_plane_are_in_the_order_of_utf_16() -> None:
    body = '{"\uffff":1e21,"\U0001f600":[{"\uffff":1,"\U0001f600":2}],"a":3}'.encode()
    assert canonical_json(body) == '{"a":3,"\U0001f600":[{"\U0001f600":2,"\uffff":1}],"\uffff":1e+21}'.encode()
