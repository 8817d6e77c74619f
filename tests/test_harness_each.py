"""A loop instead of parameters: all cases run in one item, and a failure names its case."""

from __future__ import annotations

import inspect

import pytest

from harness.each import each


def test_all_cases_of_a_product_run() -> None:
    seen = []

    @each("number", [1, 2])
    @each(("letter", "sign"), [("a", "+"), ("b", "-")])
    def test(fixture: str, number: int, letter: str, sign: str) -> None:
        seen.append((fixture, number, letter, sign))

    test(fixture="f")
    assert seen == [("f", 1, "a", "+"), ("f", 1, "b", "-"), ("f", 2, "a", "+"), ("f", 2, "b", "-")]
    assert list(inspect.signature(test).parameters) == ["fixture"]


def test_a_failure_names_its_case() -> None:
    @each("number", range(9))
    @each("letter", "ab")
    def test(number: int, letter: str) -> None:
        assert (number, letter) != (7, "b")

    with pytest.raises(AssertionError) as caught:
        test()
    assert caught.value.__notes__ == ["with letter='b'", "with number=7"]


def test_each_without_cases_raises() -> None:
    with pytest.raises(ValueError, match="no case for number"):
        each("number", [])
