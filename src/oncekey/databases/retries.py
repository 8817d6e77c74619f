"""What a driver runs once more: a transaction that lost against another one, or whose connection was lost in time.

Both failures prove that nothing was committed, so the driver may run the transaction again by itself. A connection that
was lost during a COMMIT proves nothing, and is not repeated: `CommitAmbiguousError` says so to the caller.
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
    """How often a transaction is run that fails like this."""


class ConflictError(RepeatableError):
    """Another transaction won."""

    tries = 10
    outage = False


class LostError(RepeatableError):
    """The connection was lost while nothing could be committed; another one may be better."""

    tries = 2


def lost(mode: Mode, what: str) -> StoreError:
    """The meaning of a connection that was lost during a statement of a transaction."""
    match mode:
        case Mode.READ | Mode.ATOMIC:
            return LostError(f"{what}: the connection was lost")
        case Mode.SINGLE:
            return CommitAmbiguousError(f"{what}: the connection was lost before the answer came")
        case _:
            assert_never(mode)


def lost_commit(what: str) -> CommitAmbiguousError:
    """The meaning of a connection that was lost during a COMMIT."""
    return CommitAmbiguousError(f"{what}: the connection was lost during the commit")


Failures: TypeAlias = tuple[type[RepeatableError], ...]
"""How the tries so far have failed."""


def is_last(failures: Failures) -> bool:
    """Whether the last failure has come as often as its kind may."""
    return failures.count(failures[-1]) >= failures[-1].tries


def retrying(*kinds: type[RepeatableError]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Call a function again if it fails like this, as often as the kind of the failure may be repeated."""

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
    """`retrying` for a function that is awaited."""

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
