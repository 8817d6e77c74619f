"""Retries of transactions in drivers, after a conflict with another transaction or a connection lost before COMMIT.

Both failures prove that nothing was committed, so the driver may run the transaction again. A connection that is lost
during a COMMIT proves nothing, so that is not repeated: the driver raises `CommitAmbiguousError`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar, assert_never

from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.core.flow import Mode

P = ParamSpec("P")
T = TypeVar("T")


class RepeatableError(StoreUnavailableError):
    """Nothing of the transaction was committed, so the driver may run it again."""

    tries: ClassVar[int]
    """How often a transaction that fails like this is run."""


class ConflictError(RepeatableError):
    """Another transaction conflicted with this one, and won."""

    tries = 10
    outage = False


class LostError(RepeatableError):
    """The connection was lost before anything could be committed; another one may work."""

    tries = 2


def lost(mode: Mode, what: str) -> StoreError:
    """The meaning of a connection that was lost during a statement of a transaction."""
    match mode:
        case Mode.READ | Mode.ATOMIC:
            return LostError(f"{what}: the connection was lost")
        case Mode.SINGLE:
            return CommitAmbiguousError(f"{what}: the connection was lost before the reply arrived")
        case _:
            assert_never(mode)


def lost_commit(what: str) -> CommitAmbiguousError:
    """The meaning of a connection that was lost during a COMMIT."""
    return CommitAmbiguousError(f"{what}: the connection was lost during the commit")


Failures: TypeAlias = tuple[type[RepeatableError], ...]
"""The failures of the attempts so far."""


def is_last(failures: Failures) -> bool:
    """Whether the last failure has occurred as often as its kind may."""
    return failures.count(failures[-1]) >= failures[-1].tries


def retrying(*kinds: type[RepeatableError]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Call a function again if it fails with one of these kinds, as often as that kind may be repeated."""

    def decorate(once: Callable[P, T]) -> Callable[P, T]:
        @wraps(once)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            failures: Failures = ()
            while True:
                try:
                    return once(*args, **kwargs)
                except kinds as error:
                    failures = (*failures, type(error))
                    if is_last(failures):
                        raise

        return run

    return decorate


def aretrying(
    *kinds: type[RepeatableError],
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """`retrying` for an `async def` function."""

    def decorate(once: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(once)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            failures: Failures = ()
            while True:
                try:
                    return await once(*args, **kwargs)
                except kinds as error:
                    failures = (*failures, type(error))
                    if is_last(failures):
                        raise

        return run

    return decorate
