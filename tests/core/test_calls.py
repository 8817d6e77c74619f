"""A call as data: one form for all spellings, and nothing that could look like something else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from harness.each import each
from oncekey.canonical.jcs import canonical_json
from oncekey.core.calls import Shape
from oncekey.core.errors import BodyInvalidError, ResultInvalidError
from oncekey.core.model import Code, Refuse
from oncekey.core.not_run import NotRunError, error_of
from oncekey.core.policy import Policy


class Model(BaseModel):
    price: Decimal
    parts: list[int] = []


@dataclass(frozen=True)
class Line:
    item: str
    at: datetime


class Colour(Enum):
    RED = 1


def function(
    a: int, b: Any = 2, /, *more: int, c: Model | None = None, d: Line | None = None, **rest: Decimal
) -> Model:
    raise AssertionError


def optional(a: Any, b: Any = 2) -> Any:
    raise AssertionError


def written(shape: Shape, *args: Any, **kwargs: Any) -> bytes:
    return canonical_json(shape.written(shape.bind(args, kwargs)))


def test_one_call_has_one_form() -> None:
    shape = Shape(optional, "optional", op=None)
    assert written(shape, 1) == written(shape, a=1) == written(shape, 1, 2) == written(shape, b=2, a=1)
    assert written(shape, [1]) == written(shape, (1,))
    assert written(shape, {"x": 1, "y": 2}) == written(shape, {"y": 2, "x": 1})
    assert written(shape, Model(price=Decimal("1.5"))) == written(shape, {"price": "1.5", "parts": []})


def test_other_values_have_other_forms() -> None:
    shape = Shape(optional, "optional", op=None)
    at = datetime(2026, 11, 16, tzinfo=UTC)
    values: list[Any] = [1, "1", True, None, 1.5, Decimal("1.5"), at, at.isoformat(), b"1", UUID(int=1), [1], {"1": 1}]
    forms = [written(shape, value) for value in values]
    assert len(set(forms)) == len(values)


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), {1: 2}, object(), Colour.RED, "\ud800", [[{"x": {1}}]]])
def test_ambiguous_values_are_rejected(value: Any) -> None:
    shape = Shape(optional, "optional", op=None)
    with pytest.raises(BodyInvalidError, match="optional cannot be compared with other calls"):
        shape.written(shape.bind((value,), {}))


def test_a_wrong_call_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        Shape(optional, "optional", op=None).bind((), {})


def test_arguments_are_restored_as_annotated() -> None:
    shape = Shape(function, "function", op=None, resumed=True)
    at = datetime(2026, 11, 16, tzinfo=UTC)
    given = shape.bind((1, (2, 3), 4, 5), {"c": Model(price=Decimal("9.90")), "d": Line("tea", at), "x": Decimal(7)})
    read = shape.read(shape.written(given), {})
    args, kwargs = shape.invocation(read, None)
    assert args == (1, [2, 3], 4, 5)
    assert kwargs == {"c": Model(price=Decimal("9.90")), "d": Line("tea", at), "x": Decimal(7)}
    with pytest.raises(BodyInvalidError, match="an argument is not a whole number"):
        shape.read(shape.written(shape.bind(("one",), {})), {})


def test_results_are_restored_as_declared() -> None:
    shape = Shape(function, "function", op=None)
    body, value = shape.returned(Model(price=Decimal("9.90"), parts=[1]))
    assert (value, shape.result(body)) == (Model(price=Decimal("9.90"), parts=[1]),) * 2
    assert shape.result(b'{"price":"9.90"}') == Model(price=Decimal("9.90"))  # by an operator's hand
    for body in (b"no JSON", b'{"$":"strange","v":1}', b"\xff"):
        with pytest.raises(ResultInvalidError, match="the stored result of function is not JSON"):
            shape.result(body)


def test_operation_is_passed_at_any_parameter_position() -> None:
    def between(a: int, op: Any, b: int) -> None: ...

    shape = Shape(between, "between", op="op")
    assert [*shape.signature.parameters] == ["a", "b"]
    assert shape.invocation(shape.bind((1, 2), {}), "mine") == ((1, "mine", 2), {})


@each("code", Code)
def test_every_refusal_is_some_exception(code: Code) -> None:
    error = error_of(Refuse(code), Policy(), "pay")
    assert str(error).startswith("pay: ")
    waits = {Code.IN_PROGRESS, Code.OUTCOME_UNKNOWN, Code.RATE_LIMITED}
    assert (isinstance(error, NotRunError) and error.retry_after is not None) == (code in waits)
