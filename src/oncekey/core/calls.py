"""A function's call as data: which arguments count, how they and the result are stored, and which use is rejected.

A call has one form however it was written: `f(1)`, `f(a=1)` and `f(1, 2)` are the same call of `def f(a, b=2)`. Plain
data, dataclasses and models are written as JSON, with a tag for types that JSON lacks (`oncekey.core.memo`);
anything else is rejected, because two different values could look alike. The stored form is read by the annotations, so
that a worker calls the function with the values of its first caller, and a repeated call returns the first result.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

from oncekey.core.errors import BodyInvalidError, ConfigurationError, ResultInvalidError, ResultNotStorableError
from oncekey.core.memo import decode, written
from oncekey.core.results import fitted, plain_of

Chooses = str | Callable[..., Any]
"""Selects a value from a call's arguments: the name of one parameter, or a function of the parameters it names."""

PROTECTED: Final = ("__oncekey__", "__oncekey_function__")
"""The attributes that mark a function as already protected."""

_WRITING: Final = (TypeError, ValueError, RecursionError)
_SELF: Final = ("self", "cls")
_EACH: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EMPTY: Final = inspect.Parameter.empty


def operation_name(function: Any, given: str | None, *, decorator: str) -> str:  # noqa: ANN401  (whatever was decorated)
    """The name under which the function's calls are stored; raises if the decorated object cannot be protected."""
    if isinstance(function, classmethod | staticmethod):
        raise ConfigurationError(f"put @{type(function).__name__} above @{decorator}(...), not below it")
    if not inspect.isfunction(function):
        raise ConfigurationError(
            f"@{decorator}(...) goes above a `def` or `async def` function, and this is a {type(function).__name__}"
        )
    if any(hasattr(function, mark) for mark in PROTECTED):
        raise ConfigurationError(
            f"{function.__qualname__} is already protected: use one decorator of oncekey, and remove the other"
        )
    inner = inspect.unwrap(function)
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, inner)):
        raise ConfigurationError(
            f"{function.__qualname__} is a generator: calling it runs none of its code, so nothing would be protected; "
            "return the whole result"
        )
    if given is None and "<" in function.__qualname__:
        raise ConfigurationError(
            f"{function.__qualname__} has no name that is the same in every process: move it to module level, or name "
            f"it with @{decorator}(operation=...)"
        )
    return given or function.__qualname__


class Shape:
    """The parameters and the result of one function.

    `op` is the parameter that receives the operation; it does not count. `ignore` names others that do not count,
    such as a client or a session. `resumed`: whether a worker may make the call from its stored form.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        operation: str,
        *,
        op: str | None,
        ignore: tuple[str, ...] = (),
        result: Any = None,  # noqa: ANN401  (a declaration of any kind)
        resumed: bool = False,
    ) -> None:
        self.operation = operation
        self._op = op
        self._whole = inspect.signature(function)
        shown = [one for one in self._whole.parameters.values() if one.name != op]
        self.signature = self._whole.replace(parameters=shown)
        """The signature that callers see, without the operation."""
        self._left_out = frozenset(ignore)
        for name in ignore:
            self._known(name, "ignore")
        if shown and shown[0].name in _SELF:
            self._left_out |= {shown[0].name}
        self._result = _hint(function, "return", operation) if result is None else result
        self._hints: dict[str, Any] | None = None
        if resumed:
            self._check_resumable(function)
            counted = (name for name in self.signature.parameters if name not in self._left_out)
            self._hints = {name: _hint(function, name, operation) for name in counted}

    def _check_resumable(self, function: Callable[..., Any]) -> None:
        """Reject parameters that a worker could not restore from the stored form of a call."""
        lost = [name for name in inspect.unwrap(function).__code__.co_freevars if name != "__class__"]
        if lost:
            raise ConfigurationError(
                f"{self.operation} uses {', '.join(lost)} of the enclosing function, which a worker that resumes it "
                "does not have: move it to module level, or set complete=False"
            )
        for name in self._left_out:
            if self.signature.parameters[name].default is _EMPTY:
                raise ConfigurationError(
                    f"{self.operation}: a worker that resumes it has no value for {name}: give it a default, "
                    "or set complete=False"
                )

    def _known(self, name: str, what: str) -> None:
        if name not in self.signature.parameters:
            there = ", ".join(self.signature.parameters) or "none"
            raise ConfigurationError(f"{self.operation}: {what} names {name!r}, but the parameters are {there}")

    def chooser(self, chosen: Chooses, what: str, function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
        """The function that selects the key or the tenant from a call's arguments."""
        if isinstance(chosen, str):
            self._known(chosen, what)
            kind = _hint(function, chosen, self.operation)
            if isinstance(kind, type) and not issubclass(kind, str):
                raise ConfigurationError(
                    f"{self.operation}: {what}={chosen!r} must be text, but the parameter is of type {kind.__name__}: "
                    f"write {what}=lambda {chosen}: f'...'"
                )
            return lambda arguments: arguments[chosen]
        try:
            names = tuple(inspect.signature(chosen).parameters)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"{self.operation}: {what} is the name of a parameter, or a function of parameters: "
                f"{what}=lambda order: order.id"
            ) from None
        for name in names:
            self._known(name, what)
        return lambda arguments: chosen(*(arguments[name] for name in names))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names, with the defaults; raises `TypeError` as Python does."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def written(self, arguments: Mapping[str, Any]) -> bytes:
        """The stored form of the arguments that count.

        Raises:
            BodyInvalidError: An argument is not plain data.
        """
        counted = {name: one for name, one in arguments.items() if name not in self._left_out}
        try:
            return written(plain_of(counted)).encode("utf-8")
        except _WRITING as error:
            raise BodyInvalidError(
                f"{self.operation} cannot be compared with other calls, because an argument has no stored form: {error}"
            ) from None

    def read(self, stored: bytes, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to call the function with; a worker, which has none, reads the stored form."""
        if self._hints is None:
            return dict(given)
        found: dict[str, Any] = decode(stored.decode("utf-8"))
        bound = inspect.BoundArguments(self.signature, {})
        try:
            bound.arguments = {name: self._fitted(name, one) for name, one in found.items() if name in self._hints}
        except ResultInvalidError as error:
            raise BodyInvalidError(f"{self.operation}: an argument is {error}") from None
        bound.apply_defaults()
        return {**bound.arguments, **{name: given[name] for name in self._left_out if name in given}}

    def _fitted(self, name: str, value: Any) -> Any:  # noqa: ANN401
        assert self._hints is not None
        hint, kind = self._hints[name], self.signature.parameters[name].kind
        if kind not in _EACH:
            return fitted(value, hint)
        if isinstance(value, Mapping):
            return {one: fitted(item, hint) for one, item in value.items()}
        return tuple(fitted(item, hint) for item in value)

    def invocation(self, arguments: Mapping[str, Any], op: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments for the function, including its operation."""
        handed = arguments if self._op is None else {**arguments, self._op: op}
        bound = inspect.BoundArguments(self._whole, dict(handed))
        return bound.args, bound.kwargs

    def returned(self, value: object) -> tuple[bytes, Any]:
        """The stored form of a result, and the value that is read from it, which every caller receives.

        Raises:
            ResultNotStorableError: The value is neither plain data nor a model of it.
            ResultInvalidError: The value does not fit the declaration.
        """
        body = self.stored(value)
        return body, self.result(body)

    def stored(self, value: object) -> bytes:
        """The stored form of any value that leaves the function."""
        try:
            return written(plain_of(value)).encode("utf-8")
        except _WRITING as error:
            raise ResultNotStorableError(f"the result of {self.operation} cannot be stored: {error}") from None

    def result(self, body: bytes) -> Any:  # noqa: ANN401  (whatever was declared)
        """The value of a stored result."""
        return fitted(self.plain(body), self._result)

    def plain(self, body: bytes) -> Any:  # noqa: ANN401  (plain data)
        """The plain data in a stored body."""
        try:
            return decode(body.decode("utf-8")) if body else None
        except (ValueError, LookupError):
            raise ResultInvalidError(f"the stored result of {self.operation} is not JSON") from None


def _hint(function: Callable[..., Any], name: str, operation: str) -> Any:  # noqa: ANN401
    """The annotation of a parameter or of the result; `Any` where there is none."""
    inner = inspect.unwrap(function)
    note = inner.__annotations__.get(name, Any)

    def alone() -> None: ...

    alone.__annotations__ = {name: note}
    try:
        return typing.get_type_hints(alone, inner.__globals__, include_extras=True)[name]
    except (NameError, TypeError, AttributeError, SyntaxError):
        way = "pass its type, result=..." if name == "return" else "import it at run time too"
        what = "its result" if name == "return" else name
        raise ConfigurationError(
            f"{operation}: the annotation {note!r} of {what} cannot be resolved, so a stored value could not be "
            f"read: {way}"
        ) from None
