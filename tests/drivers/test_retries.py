"""Which failures a driver repeats by itself, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.databases.retries import ConflictError, LostError, aretrying, lost, lost_commit, retrying

CONFLICT, LOSS = ConflictError("another won"), LostError("the connection was lost")
AMBIGUOUS, SICK = lost_commit("w"), StoreUnavailableError("the disk is full")


def _blocking(fails: Iterator[Exception], kinds: tuple[type, ...]) -> Callable[[str], str]:
    @retrying(*kinds)
    def once(given: str) -> str:
        for error in fails:
            raise error
        return given

    return once


def _awaited(fails: Iterator[Exception], kinds: tuple[type, ...]) -> Callable[[str], str]:
    @aretrying(*kinds)
    async def once(given: str) -> str:
        for error in fails:
            raise error
        return given

    return lambda given: asyncio.run(once(given))


@pytest.mark.parametrize("make", [_blocking, _awaited])
@pytest.mark.parametrize(
    ("fails", "kinds", "raised"),
    [
        ([], (ConflictError, LostError), None),
        ([CONFLICT] * 9, (ConflictError, LostError), None),
        ([CONFLICT] * 10, (ConflictError, LostError), CONFLICT),
        ([LOSS], (ConflictError, LostError), None),
        ([LOSS] * 2, (ConflictError, LostError), LOSS),
        ([CONFLICT] * 9 + [LOSS], (ConflictError, LostError), None),  # each kind is counted by itself
        ([CONFLICT, LOSS, CONFLICT, LOSS], (ConflictError, LostError), LOSS),
        ([CONFLICT], (LostError,), CONFLICT),
        ([AMBIGUOUS], (ConflictError, LostError), AMBIGUOUS),
        ([SICK], (ConflictError, LostError), SICK),
    ],
)
def test_failures_without_effect_are_repeated(make, fails, kinds, raised):
    left = iter(fails)
    run = make(left, kinds)
    if raised is None:
        assert run("x") == "x"
    else:
        with pytest.raises(type(raised)) as found:
            run("x")
        assert found.value is raised
    assert list(left) == []


@pytest.mark.parametrize(
    ("mode", "kind"), [(Mode.READ, LostError), (Mode.ATOMIC, LostError), (Mode.SINGLE, CommitAmbiguousError)]
)
def test_a_lost_connection_is_repeated_only_where_nothing_can_be_committed(mode, kind):
    assert type(lost(mode, "w")) is kind
