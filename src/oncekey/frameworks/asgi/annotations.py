"""Finds the parameter of a handler that is its operation, by its annotations: types, or text that is looked up.

Text is never evaluated: a name may be one that only a type checker can import.
"""

from __future__ import annotations

import ast
import inspect
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, get_args, get_origin

from oncekey.core.errors import ConfigurationError
from oncekey.engine.operation import Operation, SyncOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BY_NAME: Final = {"Operation": Operation, "SyncOperation": SyncOperation}


def operation_parameter(handler: Callable[..., Any], *, blocking: bool) -> str | None:
    """The name of the parameter that is annotated as an operation, if there is one."""
    wanted, other = (SyncOperation, Operation) if blocking else (Operation, SyncOperation)
    names = getattr(inspect.unwrap(handler), "__globals__", {})
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.name == "op" and parameter.annotation is parameter.empty:
            raise ConfigurationError(
                f"{handler.__qualname__} has a parameter op without an annotation, which the framework would take for "
                f"one of the request's: write op: {wanted.__name__}"
            )
        kinds = list(_kinds(parameter.annotation, names))
        if other in kinds:
            word = "def" if blocking else "async def"
            raise ConfigurationError(
                f"{handler.__qualname__} is `{word}`, so annotate {parameter.name} as {wanted.__name__}, "
                f"not {other.__name__}"
            )
        if wanted in kinds:
            return parameter.name
    return None


def _kinds(annotation: object, names: Mapping[str, object]) -> Iterator[type]:
    """The operation classes that an annotation names: `Operation[X]`, `Operation | None`, or an alias of one."""
    if isinstance(annotation, str):
        try:
            yield from _spoken(ast.parse(annotation.strip(), mode="eval").body, names)
        except SyntaxError:
            return
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _kinds(part, names)
    else:
        meant = get_origin(annotation) or annotation
        if meant is Operation or meant is SyncOperation:
            yield meant


def _spoken(node: ast.expr, names: Mapping[str, object]) -> Iterator[type]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _spoken(left, names)
            yield from _spoken(right, names)
        case ast.Subscript(value=ast.Name(id="Annotated" | "Optional" | "Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _spoken(part, names)
        case ast.Subscript(value=ast.Name(id="Annotated" | "Optional" | "Union"), slice=part):
            yield from _spoken(part, names)
        case ast.Subscript(value=value):
            yield from _spoken(value, names)
        case ast.Constant(value=str() as text):
            yield from _kinds(text, names)
        case ast.Name(id=name):
            yield from _looked_up(names.get(name), name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            yield from _looked_up(getattr(names.get(module), name, None), name)
        case ast.Attribute(attr=name):
            yield from _looked_up(None, name)


def _looked_up(found: object, name: str) -> Iterator[type]:
    """The class that a name stands for in the handler's module; by the name alone if only a type checker imports it."""
    if found is not None:
        yield from _kinds(found, {})
    elif name in _BY_NAME:
        yield _BY_NAME[name]
