"""One logical operation as a generator without I/O: what to send, how long to wait, and the outcome.

It yields `Send` and `Wait`, is sent a `Reply` or a `Failure` for the one and nothing for the other, and returns an
`Outcome`. Key, method, address and body are those of the original call, on every try. Only `drive` and `adrive` exist
in a blocking and an asyncio version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from oncekey.client.exchange import Call, Failure, Reply, same_origin
from oncekey.client.matrix import NextMove, is_ours, next_move, polled
from oncekey.client.profiles import IETF, Profile
from oncekey.core.errors import ConfigurationError
from oncekey.core.pacing import Backoff, retry_after

if TYPE_CHECKING:
    from collections.abc import Collection

_DESCRIBES_BODY: Final = ("content-type", "content-length", "content-encoding", "transfer-encoding", "host")


@dataclass(frozen=True, slots=True)
class RetryRules:
    """The limits of the client. `deadline` (seconds) must end well before the server forgets keys."""

    profile: Profile = IETF
    attempts: int = 5
    deadline: float = 60.0
    backoff: Backoff = field(default_factory=Backoff)
    redirects: int = 5
    methods: Collection[str] = frozenset({"POST", "PATCH"})

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.deadline < float("inf") or self.redirects < 0:
            raise ConfigurationError("rules need attempts >= 1, a finite deadline > 0 and redirects >= 0")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings of the flow: a monotonic clock, the time of day, and random numbers from 0 to 1."""

    clock: Callable[[], float]
    time: Callable[[], float]
    chance: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Send:
    """Send this now."""

    call: Call


@dataclass(frozen=True, slots=True)
class Wait:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The operation has this answer; its key is used up."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Unsettled:
    """It did not happen, and the same key may be sent again: no connection, not admitted, too many requests."""

    last: Reply | Failure


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have happened."""

    why: str
    last: Reply | Failure
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Misused:
    """The key belongs to another request."""

    reply: Reply


Outcome: TypeAlias = Answered | Unsettled | Unknown | Misused
Action: TypeAlias = Send | Wait
Attempts: TypeAlias = Generator[Action, Reply | Failure | None, Outcome]


def attempts(call: Call, rules: RetryRules, world: Surroundings) -> Attempts:
    """All tries for one call, which has its key already."""
    patience = _Patience(rules, world)
    target, hops, doubt = call, 0, False
    while True:
        last = yield Send(target)
        assert last is not None
        row = next_move(last, rules.profile)
        doubt = doubt or row.doubt
        if row.move is NextMove.REDIRECT and hops < rules.redirects and (moved := _moved(target, last)):
            target, hops = call.at(moved), hops + 1
            continue
        ended = _ended(row.move, last, doubt=doubt)
        if ended is not None:
            return ended
        found = yield from _pause(row.move, call, last, patience, rules.profile)
        if found is None:
            return _give_up("no answer before the client's limits were reached", last, doubt=doubt)
        if isinstance(found, Reply):
            return Answered(found)
        yield Wait(found)
        # A redirect is followed anew each time: retries go to the caller's address.
        target, hops = call, 0


def _ended(move: NextMove, last: Reply | Failure, *, doubt: bool) -> Outcome | None:
    """The outcome, if it is known now."""
    match move:
        case NextMove.STOP:
            # It says nothing about what an earlier try did.
            return _give_up("the last try was turned away", last, doubt=doubt)
        case NextMove.EXPIRED:
            return Unknown("the server has forgotten the key", last, expired=True)
        case NextMove.RETRY | NextMove.WAIT | NextMove.POLL:
            return None
        case NextMove.ACCEPT | NextMove.REDIRECT | NextMove.MISUSED:
            assert isinstance(last, Reply)
            return Misused(last) if move is NextMove.MISUSED else Answered(last)
        case _:
            assert_never(move)


def _pause(
    move: NextMove, call: Call, last: Reply | Failure, patience: _Patience, profile: Profile
) -> Generator[Action, Reply | Failure | None, Reply | float | None]:
    """How long to wait; None if there is no time left to wait, and an answer if waiting brought one."""
    if move is NextMove.POLL and isinstance(last, Reply):
        return (yield from _poll(call, last, patience, profile))
    return patience.while_working(last) if move is NextMove.WAIT else patience.after_failure(last)


def _moved(call: Call, last: Reply | Failure) -> str | None:
    location = last.field("Location") if isinstance(last, Reply) else None
    return None if location is None else same_origin(call, location)


def _poll(
    call: Call, accepted: Reply, patience: _Patience, profile: Profile
) -> Generator[Action, Reply | Failure | None, Reply | float | None]:
    """Poll the status resource until it is over: an answer, or the time to wait before the key is sent again."""
    place = _moved(call, accepted)
    pause = patience.while_working(accepted)
    if place is None:
        return pause
    look = Call("GET", place, call.without(profile.field, *_DESCRIBES_BODY).headers)
    while pause is not None:
        yield Wait(pause)
        seen = yield Send(look)
        assert seen is not None
        if isinstance(seen, Reply) and polled(seen) is NextMove.ACCEPT:
            # The status resource of oncekey only reports; the answer itself is fetched with the key.
            fetch = is_ours(accepted, profile) or not _is_success(seen)
            return patience.briefly() if fetch else seen
        pause = patience.while_working(seen)
    return None


def _is_success(reply: Reply) -> bool:
    return 200 <= reply.status < 300  # noqa: PLR2004  (the class of statuses)


def _give_up(why: str, last: Reply | Failure, *, doubt: bool) -> Outcome:
    return Unknown(why, last) if doubt else Unsettled(last)


class _Patience:
    """The attempts and the time that are left. A pause is None if there is no time for it."""

    def __init__(self, rules: RetryRules, world: Surroundings) -> None:
        self._rules, self._world = rules, world
        self._end = world.clock() + rules.deadline
        self._failures = 0
        self._waits = 0

    def after_failure(self, last: Reply | Failure) -> float | None:
        self._failures += 1
        if self._failures >= self._rules.attempts:
            return None
        return self._pause(self._failures - 1, last)

    def while_working(self, last: Reply | Failure) -> float | None:
        self._waits += 1
        return self._pause(self._waits - 1, last)

    def briefly(self) -> float | None:
        return self._within(self._rules.backoff.floor)

    def _pause(self, failures: int, last: Reply | Failure) -> float | None:
        header = last.field("Retry-After") if isinstance(last, Reply) else None
        asked = None if header is None else retry_after(header, self._world.time())
        return self._within(self._rules.backoff.wait(failures, self._world.chance(), asked=asked))

    def _within(self, seconds: float) -> float | None:
        # A wait that ends after the deadline is not begun: no try could follow it.
        return seconds if self._world.clock() + seconds < self._end else None


def drive(flow: Attempts, send: Callable[[Call], Reply | Failure], sleep: Callable[[float], object]) -> Outcome:
    """Perform a flow in this thread."""
    try:
        action = next(flow)
        while True:
            match action:
                case Send(call):
                    action = flow.send(send(call))
                case Wait(seconds):
                    sleep(seconds)
                    action = next(flow)
                case _:
                    assert_never(action)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        flow.close()


async def adrive(
    flow: Attempts, send: Callable[[Call], Awaitable[Reply | Failure]], sleep: Callable[[float], Awaitable[object]]
) -> Outcome:
    """`drive`, awaiting each exchange and each pause."""
    try:
        action = next(flow)
        while True:
            match action:
                case Send(call):
                    action = flow.send(await send(call))
                case Wait(seconds):
                    await sleep(seconds)
                    action = next(flow)
                case _:
                    assert_never(action)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        flow.close()
