"""Whether a LOCAL or OUTBOX handler takes the transaction of its key, judged by its signature and its code.

A handler that takes none can only write on another connection, whose rows do not commit with the key.
"""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any, Final

from oncekey.frameworks.asgi.protect import operation_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType

    from oncekey.engine.enrolment import Enrolment

_ROOTS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_STEPS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def writes_apart(
    handler: Callable[..., Any], enrolment: Enrolment, dependencies: Iterable[Callable[..., Any]] = ()
) -> bool:
    """Whether a handler with a transaction, and its (nested) `dependencies`, take nothing to write through."""
    owner: Any = enrolment.owner
    if not enrolment.transactional or getattr(getattr(owner, "store", None), "ambient", False):
        return False
    bare = inspect.unwrap(handler)
    if operation_parameter(bare, blocking=enrolment.blocking) is not None:
        return False
    lent = (getattr(owner, "session", None), getattr(owner, "connection", None))
    return not any(one in lent for one in (*dependencies, *_loaded(bare)))


def _loaded(function: Callable[..., Any]) -> Iterator[Any]:
    """The objects that the code of a function loads by name: `once.session`, `shop.once.session`, or an alias."""
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return
    known = {**getattr(function, "__globals__", {})}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # a name without a value yet
            continue
    yield from _loaded_by(code, known)


def _loaded_by(code: CodeType, known: Mapping[str, Any]) -> Iterator[Any]:
    found: Any = None
    for step in dis.get_instructions(code):
        if step.opname in _ROOTS:
            found = known.get(step.argval)
        elif step.opname in _STEPS and found is not None:
            found = _attribute(found, step.argval)
        elif step.opname != "PUSH_NULL":
            found = None
        if found is not None:
            yield found
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _loaded_by(constant, known)


def _attribute(found: Any, name: str) -> Any:  # noqa: ANN401  (of any object)
    """An attribute, without running code of the application: only oncekey's own properties are evaluated."""
    value = inspect.getattr_static(found, name, None)
    if isinstance(value, property):
        return getattr(found, name) if type(found).__module__.partition(".")[0] == "oncekey" else None
    return value
