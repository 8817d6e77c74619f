"""Declarations of a call's result: what fits, what does not, and what the sentence about it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import pytest
from pydantic import BaseModel

from harness.each import each
from oncekey.core.errors import ResultInvalidError
from oncekey.core.results import fitted, plain_of, shape_of


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    id: str
    number: int = 1


@dataclass
class Whole:
    parts: list[Part]
    at: datetime | None = None
    tags: dict[str, int] = field(default_factory=dict)


class Typed(TypedDict):
    id: str
    note: NotRequired[str]


class Model(BaseModel):
    id: str
    amount: Decimal


ZERO = "00000000-0000-0000-0000-000000000000"


@each(
    ("value", "declared", "made"),
    [
        (7, int, 7),
        (7, float, 7.0),
        ("x", str, "x"),
        (True, bool, True),
        (None, type(None), None),
        ({"a": 1}, dict, {"a": 1}),
        ([1], list, [1]),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], Sequence[int], [1, 2]),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1, 2], tuple[int, ...], (1, 2)),
        ({"a": 1}, dict[str, int], {"a": 1}),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        (None, int | None, None),
        ("red", Colour, Colour.RED),
        ("red", Literal["red"], "red"),
        ("x", Annotated[str, "why"], "x"),
        ("1.50", Decimal, Decimal("1.50")),
        (7, Decimal, Decimal(7)),
        (ZERO, UUID, UUID(int=0)),
        ("2026-11-16", date, date(2026, 11, 16)),
        ("2026-11-16T00:00:00+00:00", datetime, datetime(2026, 11, 16, tzinfo=UTC)),
        ({"id": "a", "more": 1}, Part, Part("a")),
        ({"parts": [{"id": "a", "number": 2}]}, Whole, Whole([Part("a", 2)])),
        ({"id": "a"}, Typed, {"id": "a"}),
        ({"id": "a", "amount": "7"}, Model, Model(id="a", amount=Decimal(7))),
        ("7", lambda value: int(value) + 1, 8),
        ({"x": object}, Any, {"x": object}),
    ],
)
def test_matching_value_is_converted_to_its_declared_type(value, declared, made):
    assert fitted(value, declared) == made
    assert type(fitted(value, declared)) is type(made)


@each(
    ("value", "declared", "sentence"),
    [
        ("7", int, "not a whole number: it is text, and a whole number was declared"),
        (True, int, "not a whole number: it is true or false"),
        (1.5, int, "it is a number"),
        (None, str, "it is null"),
        ([1], dict, "it is a list"),
        ([1, "x"], list[int], "at [1]: it is text"),
        ([1], tuple[int, int], "it has 1 items, and 2 were declared"),
        ({"a": "x"}, dict[str, int], "at .a: it is text"),
        ("x", int | None, "not int | None: it is text"),
        ("green", Colour, "it is text that is not a valid Colour"),
        ("green", Literal["red"], "it is none of 'red'"),
        ("x", Decimal, "it is text that is not a valid Decimal"),
        (7, datetime, "it is a whole number that is not a valid datetime"),
        ({}, Part, "not Part: id is missing"),
        ([], Part, "not Part: it is a list, and an object was declared"),
        ({"parts": [{"id": "a"}, {"id": 7}]}, Whole, "at .parts[1].id: it is a whole number"),
        ({"note": "x"}, Typed, "id is missing"),
        ({"id": "a", "amount": "much"}, Model, "not Model: amount: Input should be a valid decimal"),
        ("x", int.__add__, "it raised TypeError"),
        ("x", 7, "7 is neither a type nor a function"),
    ],
)
def test_mismatching_value_is_rejected_with_a_reason(value, declared, sentence):
    with pytest.raises(ResultInvalidError) as told:
        fitted(value, declared)
    assert sentence in str(told.value)
    assert told.value.__cause__ is None


def test_error_messages_quote_no_value():
    secret = "4111-1111-1111-1111"
    for declared in (int, Colour, Decimal, Part, Model, Typed, list[int], Literal["red"], lambda value: value.no):
        for value in (secret, {"id": {"x": secret}, "amount": secret}, [secret]):
            with pytest.raises(ResultInvalidError) as told:
                fitted(value, declared)
            assert secret not in str(told.value)


def test_models_become_plain_data():
    assert plain_of(Whole([Part("a")])) == {"parts": [{"id": "a", "number": 1}], "at": None, "tags": {}}
    assert plain_of(Model(id="a", amount=Decimal("1.5"))) == {"id": "a", "amount": "1.5"}
    assert plain_of({"x": 1}) == {"x": 1}


def test_shape_contains_only_names_and_types():
    found = shape_of({"id": "ch_secret", "amount": 7, "paid": True, "at": None, "lines": [{"sku": "x"}, {"sku": "y"}]})
    assert found == {
        "id": "text", "amount": "a whole number", "paid": "true or false", "at": "null", "lines": [{"sku": "text"}],
    }  # fmt: skip
