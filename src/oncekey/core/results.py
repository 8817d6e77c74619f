"""Declared results of calls, `op.call(..., result=Charge)`: conversion and checks (H1).

A declaration is a type (`int`, `list[str]`, a `TypedDict`), a dataclass, a pydantic model or a function. Plain data is
stored; the handler's value is created from the stored form, on the first run and on every later one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from oncekey.core.errors import ResultInvalidError

_LISTS: Final = (list, tuple, Sequence, set, frozenset)
_NAMES: Final = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_READ: Final[Mapping[type, Callable[[Any], Any]]] = types.MappingProxyType(
    {
        Decimal: lambda value: Decimal(str(value)),
        UUID: lambda value: UUID(str(value)),
        datetime: datetime.fromisoformat,
        date: date.fromisoformat,
    }
)
"""Types that JSON lacks are read from text, so that an operator can type them."""


class _Misfit(Exception):  # noqa: N818  (it never leaves this module)
    """A value does not fit its declaration, and where."""

    def __init__(self, sentence: str, place: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.place = sentence, place

    def within(self, step: str) -> _Misfit:
        return _Misfit(self.sentence, f"{step}{self.place}")


def fitted(value: Any, declared: Any) -> Any:  # noqa: ANN401  (whatever was declared)
    """The value, converted to its declaration.

    Raises:
        ResultInvalidError: It does not fit. The message names the place and no value: values are clients' data.
    """
    try:
        return _declared(value, declared)
    except _Misfit as misfit:
        where = f"at {misfit.place}: " if misfit.place else ""
        raise ResultInvalidError(f"not {name_of(declared)}: {where}{misfit.sentence}") from None


def plain_of(value: Any) -> Any:  # noqa: ANN401  (whatever a call returned)
    """A value with models and dataclasses, at any depth, as plain data that can be stored."""
    if hasattr(type(value), "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain_of(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain_of(one) for name, one in value.items()}
    return [plain_of(one) for one in value] if isinstance(value, list | tuple) else value


def name_of(declared: Any) -> str:  # noqa: ANN401  (whatever was declared)
    """The name of a declaration, for messages."""
    return _NAMES.get(declared) or getattr(declared, "__qualname__", None) or str(declared)


def shape_of(value: Any) -> Any:  # noqa: ANN401  (decoded JSON)
    """The structure of a result without its content: names, and the type of each value."""
    if isinstance(value, Mapping):
        return {name: shape_of(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [shape_of(one) for one in value[:1]]
    return _NAMES.get(type(value), type(value).__name__)


def _declared(value: Any, declared: Any) -> Any:  # noqa: ANN401  (one line for each kind of declaration)
    if declared is Any:
        return value
    if hasattr(declared, "model_validate"):
        return _by_pydantic(value, declared)
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        return _dataclass(value, declared)
    if typing.is_typeddict(declared):
        return _typed_dict(value, declared)
    origin = get_origin(declared)
    if origin is not None:
        return _generic(value, origin, get_args(declared), declared)
    if declared is None or declared in _NAMES:
        return _simple(value, type(None) if declared is None else declared)
    if isinstance(declared, type):
        return _of_type(value, declared)
    if callable(declared):
        return _by_function(value, declared)
    raise _Misfit(f"{declared!r} is neither a type nor a function")


def _simple(value: Any, kind: type) -> Any:  # noqa: ANN401
    fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits:
        raise _Misfit(f"it is {_kind_of(value)}, and {_NAMES[kind]} was declared")
    return value


def _of_type(value: Any, kind: type) -> Any:  # noqa: ANN401
    if isinstance(value, kind):
        return value
    if issubclass(kind, Enum):
        return _tried(kind, value, kind)
    if kind in _READ:
        return _tried(_READ[kind], value, kind)
    if kind in {list, dict, tuple, set, frozenset, bytes, timedelta}:
        raise _Misfit(f"it is {_kind_of(value)}, and a {kind.__name__} was declared")
    return _tried(kind, value, kind)


def _generic(value: Any, origin: Any, given: tuple[Any, ...], declared: Any) -> Any:  # noqa: ANN401
    if origin in {Union, types.UnionType}:
        return _first_of(value, given)
    if origin is typing.Literal:
        if not any(type(value) is type(one) and value == one for one in given):
            raise _Misfit(f"it is none of {', '.join(map(repr, given))}")
        return value
    if origin in {typing.Annotated, typing.Required, typing.NotRequired}:
        return _declared(value, given[0])
    if origin in _LISTS:
        return _list(value, origin, given)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _Misfit(f"it is {_kind_of(value)}, and an object was declared")
        return {name: _at(f".{name}", one, given[1]) for name, one in value.items()}
    raise _Misfit(f"{declared} cannot be checked: declare a function")


def _first_of(value: Any, kinds: tuple[Any, ...]) -> Any:  # noqa: ANN401
    misfits = []
    for kind in kinds:
        try:
            return _declared(value, kind)
        except _Misfit as misfit:
            misfits.append(misfit)
    raise max(misfits, key=lambda misfit: len(misfit.place))  # the alternative that matched most


def _list(value: Any, origin: Any, given: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if not isinstance(value, list | tuple):
        raise _Misfit(f"it is {_kind_of(value)}, and a list was declared")
    fixed = origin is tuple and (len(given) != 2 or given[1] is not Ellipsis)  # noqa: PLR2004  (`tuple[int, ...]`)
    if fixed and len(value) != len(given):
        raise _Misfit(f"it has {len(value)} items, and {len(given)} were declared")
    kinds = given if fixed else [given[0]] * len(value)
    items = [_at(f"[{place}]", one, kind) for place, (one, kind) in enumerate(zip(value, kinds, strict=True))]
    return items if origin in {list, Sequence} else origin(items)


def _dataclass(value: Any, declared: type) -> Any:  # noqa: ANN401
    if isinstance(value, declared):
        return value
    hints = get_type_hints(declared, include_extras=True)
    fields = [one for one in dataclasses.fields(declared) if one.init]
    needed = {
        one.name for one in fields if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    given = _members(value, {one.name for one in fields}, needed)
    made = {name: _at(f".{name}", one, hints[name]) for name, one in given.items()}
    return _tried(lambda members: declared(**members), made, declared)


def _typed_dict(value: Any, declared: Any) -> Any:  # noqa: ANN401
    hints = get_type_hints(declared, include_extras=True)
    # From the hints, because `__required_keys__` is wrong if annotations are text.
    given = _members(value, set(hints), {name for name, hint in hints.items() if _is_needed(hint, declared)})
    return {name: _at(f".{name}", one, hints[name]) for name, one in given.items()}


def _is_needed(hint: Any, declared: Any) -> bool:  # noqa: ANN401
    origin = get_origin(hint)
    return origin is typing.Required or (origin is not typing.NotRequired and bool(declared.__total__))


def _members(value: Any, known: set[str], needed: set[str]) -> Mapping[str, Any]:  # noqa: ANN401
    if not isinstance(value, Mapping):
        raise _Misfit(f"it is {_kind_of(value)}, and an object was declared")
    if missing := sorted(needed - set(value)):
        raise _Misfit(f"{', '.join(missing)} is missing")
    # A provider may add members at any time, so undeclared ones are allowed.
    return {name: one for name, one in value.items() if name in known}


def _at(step: str, value: Any, declared: Any) -> Any:  # noqa: ANN401
    try:
        return _declared(value, declared)
    except _Misfit as misfit:
        raise misfit.within(step) from None


def _by_pydantic(value: Any, declared: Any) -> Any:  # noqa: ANN401
    try:
        return declared.model_validate(value)
    except ValueError as error:
        errors = getattr(error, "errors", None)
        lines = errors(include_url=False, include_context=False, include_input=False) if errors else ()
        reasons = "; ".join(f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in lines)
        raise _Misfit(reasons or type(error).__name__) from None


def _by_function(value: Any, declared: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    try:
        return declared(value)
    except Exception as error:  # noqa: BLE001  (whatever it raises means that the value is not what it takes)
        # The text of an error may quote the value, and this sentence is logged.
        raise _Misfit(f"it raised {type(error).__name__}") from None


def _tried(make: Callable[[Any], Any], value: Any, kind: Any) -> Any:  # noqa: ANN401
    try:
        return make(value)
    except (TypeError, ValueError, InvalidOperation):
        raise _Misfit(f"it is {_kind_of(value)} that is not a valid {name_of(kind)}") from None


def _kind_of(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else _NAMES.get(type(value), f"a {type(value).__name__}")
