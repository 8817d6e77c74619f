"""What a handler's source code declares about its calls. The code is parsed, not run; names are looked up in it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oncekey.core.model import Effects

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.workers.tasks import Application


def declared_by(handler: Callable[..., Any], phase: str) -> Any:  # noqa: ANN401  (whatever was declared)
    """The `result=` of `op.call(phase, ..., result=DECLARED)`; None if the code does not show it."""
    for attribute, name, node in _asked(handler):
        if (attribute, name) == ("call", phase):
            given = next((one.value for one in node.keywords if one.arg == "result"), None)
            return None if given is None else _looked_up(given, inspect.unwrap(handler))
    return None


def inline_calls_of(once: Application) -> dict[str, tuple[str, ...]]:
    """By operation, the calls of INLINE handlers, which announce none: from resolvers and `op.downstream_key`."""
    found: dict[str, tuple[str, ...]] = {operation: (name,) for operation, name in once.resolvers.inline_calls.items()}
    for operation, handler in once.enrolled.items():
        enrolment = once.enrolment_of(operation)
        if enrolment is not None and enrolment.effects is Effects.INLINE:
            names = (name for attribute, name, _ in _asked(handler) if attribute == "downstream_key")
            found[operation] = tuple(dict.fromkeys((*found.get(operation, ()), *names)))
    return {operation: names for operation, names in found.items() if names}


def _asked(handler: Callable[..., Any]) -> Iterator[tuple[str, str, ast.Call]]:
    """Every method call with a name as its first argument: the method, the name, and the call itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(handler))))
    except (OSError, TypeError, SyntaxError):
        return  # the handler was defined at a prompt, or by another program
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=attribute), args=[ast.Constant(value=str() as name), *_]):
                yield attribute, name, node


def _looked_up(node: ast.expr, function: Callable[..., Any]) -> Any:  # noqa: ANN401  (whatever it names)
    match node:
        case ast.Name(id=name):
            seen = inspect.getclosurevars(function)
            return {**seen.builtins, **seen.globals, **seen.nonlocals}.get(name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(_looked_up(inner, function), name, None)
        case _:
            return None
