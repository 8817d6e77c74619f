"""The type of `op.call`, for type checkers: its function takes up to four positional arguments, and `key`.

A `ParamSpec` cannot describe that: it assigns every keyword to the function, and `op.call` has its own options.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, Protocol, Required, TypedDict, TypeVar, Unpack, overload

R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)


class CallStep(TypedDict, total=False):
    """The options of a call."""

    repeatable: Required[bool | timedelta]
    parameters: object


class DeclaredCallStep(CallStep, Generic[R], total=False):
    """The options of a call whose result is declared."""

    result: Required[type[R] | Callable[[Any], R]]


class Call0(Protocol[R_co]):
    """A function with no argument but `key`."""

    def __call__(self, *, key: str) -> R_co:
        """Make the call."""


class Call1(Protocol[A_contra, R_co]):
    """A function with one argument."""

    def __call__(self, a: A_contra, /, *, key: str) -> R_co:
        """Make the call."""


class Call2(Protocol[A_contra, B_contra, R_co]):
    """A function with two arguments."""

    def __call__(self, a: A_contra, b: B_contra, /, *, key: str) -> R_co:
        """Make the call."""


class Call3(Protocol[A_contra, B_contra, C_contra, R_co]):
    """A function with three arguments."""

    def __call__(self, a: A_contra, b: B_contra, c: C_contra, /, *, key: str) -> R_co:
        """Make the call."""


class Call4(Protocol[A_contra, B_contra, C_contra, D_contra, R_co]):
    """A function with four arguments."""

    def __call__(self, a: A_contra, b: B_contra, c: C_contra, d: D_contra, /, *, key: str) -> R_co:
        """Make the call."""


class AsyncCall(Protocol):
    """`call` of an `Operation`: the result of a coroutine function is awaited."""

    @overload
    def __call__(self, name: str, fn: Call0[Any], /, **how: Unpack[DeclaredCallStep[R]]) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(self, name: str, fn: Call0[Awaitable[R]], /, **how: Unpack[CallStep]) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(self, name: str, fn: Call0[R], /, **how: Unpack[CallStep]) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call1[A, Any], a: A, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call1[A, Awaitable[R]], a: A, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(self, name: str, fn: Call1[A, R], a: A, /, **how: Unpack[CallStep]) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call2[A, B, Any], a: A, b: B, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call2[A, B, Awaitable[R]], a: A, b: B, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call2[A, B, R], a: A, b: B, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call3[A, B, C, Any], a: A, b: B, c: C, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call3[A, B, C, Awaitable[R]], a: A, b: B, c: C, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call3[A, B, C, R], a: A, b: B, c: C, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call4[A, B, C, D, Any], a: A, b: B, c: C, d: D, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call4[A, B, C, D, Awaitable[R]], a: A, b: B, c: C, d: D, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def __call__(
        self, name: str, fn: Call4[A, B, C, D, R], a: A, b: B, c: C, d: D, /, **how: Unpack[CallStep]
    ) -> Coroutine[Any, Any, R]: ...


class BlockingCall(Protocol):
    """`call` of a `SyncOperation`."""

    @overload
    def __call__(self, name: str, fn: Call0[Any], /, **how: Unpack[DeclaredCallStep[R]]) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call0[R], /, **how: Unpack[CallStep]) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call1[A, Any], a: A, /, **how: Unpack[DeclaredCallStep[R]]) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call1[A, R], a: A, /, **how: Unpack[CallStep]) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call2[A, B, Any], a: A, b: B, /, **how: Unpack[DeclaredCallStep[R]]) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call2[A, B, R], a: A, b: B, /, **how: Unpack[CallStep]) -> R: ...

    @overload
    def __call__(
        self, name: str, fn: Call3[A, B, C, Any], a: A, b: B, c: C, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> R: ...

    @overload
    def __call__(self, name: str, fn: Call3[A, B, C, R], a: A, b: B, c: C, /, **how: Unpack[CallStep]) -> R: ...

    @overload
    def __call__(
        self, name: str, fn: Call4[A, B, C, D, Any], a: A, b: B, c: C, d: D, /, **how: Unpack[DeclaredCallStep[R]]
    ) -> R: ...

    @overload
    def __call__(
        self, name: str, fn: Call4[A, B, C, D, R], a: A, b: B, c: C, d: D, /, **how: Unpack[CallStep]
    ) -> R: ...


class _AsyncMethod(Protocol):
    def __get__(self, instance: object, owner: type | None = None) -> AsyncCall:
        """The method of an operation."""


class _BlockingMethod(Protocol):
    def __get__(self, instance: object, owner: type | None = None) -> BlockingCall:
        """The method of an operation."""


def async_call(method: Callable[..., Any]) -> _AsyncMethod:
    """Declare the type of a method; it is returned unchanged."""
    return method


def blocking_call(method: Callable[..., Any]) -> _BlockingMethod:
    """Declare the type of a blocking method; it is returned unchanged."""
    return method
