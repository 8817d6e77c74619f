"""One logical operation: the attempts as a generator without I/O, and the session before and after them.

The generator decides what to send and how long to wait: it yields `Send`, which is answered with a `Reply` or
a `Failure`, and `Wait`, and returns an `Outcome`. Key, method, URL and body are those of the original
call, on every attempt. Only `drive` and `adrive` exist in a blocking and an asyncio version. The session chooses the
key, stores it in the journal, and returns or raises the outcome.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Container, Generator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never
from uuid import uuid4

from oncekey_client.exchange import (
    Call,
    ClientConfigurationError,
    Failure,
    PersonalKeyWarning,
    Reply,
    RequestKeyExpiredError,
    RequestKeyReusedError,
    RequestOutcomeUnknownError,
    same_origin,
)
from oncekey_client.journal import Journal, JournalEntry
from oncekey_client.keys import looks_personal
from oncekey_client.profiles import IETF, NextMove, Profile, is_ours, is_status_of, next_move, polled
from oncekey_client.waits import Backoff, parse_retry_after

_DESCRIBES_BODY: Final = ("content-type", "content-length", "content-encoding", "transfer-encoding", "host")


@dataclass(frozen=True, slots=True)
class RetryRules:
    """The limits of the client. `deadline` (seconds) must end well before the server's keys expire."""

    profile: Profile = IETF
    attempts: int = 5
    deadline: float = 60.0
    backoff: Backoff = field(default_factory=Backoff)
    redirects: int = 5
    methods: Collection[str] = frozenset({"POST", "PATCH"})

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.deadline < float("inf") or self.redirects < 0:
            raise ClientConfigurationError("rules need attempts >= 1, a finite deadline > 0 and redirects >= 0")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment of the flow: a monotonic clock, the time of day, and random numbers from 0 to 1."""

    clock: Callable[[], float]
    time: Callable[[], float]
    chance: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Send:
    """Send this request now."""

    call: Call


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for this number of seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The operation has this response; its key is used up."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The operation did not happen, and its key may be sent again: no connection, not admitted, too many requests."""

    last: Reply | Failure


@dataclass(frozen=True, slots=True)
class Unknown:
    """The operation may have happened."""

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
    """All attempts of one call, which has its key already."""
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
            return _give_up("no response before the client's limits were reached", last, doubt=doubt)
        if isinstance(found, Reply):
            return Answered(found)
        yield Wait(found)
        # A redirect is followed again each time: retries go to the original URL.
        target, hops = call, 0


def _ended(move: NextMove, last: Reply | Failure, *, doubt: bool) -> Outcome | None:
    """The outcome, if it is known now."""
    match move:
        case NextMove.STOP:
            # This response proves nothing about an earlier attempt.
            return _give_up("the last attempt was refused", last, doubt=doubt)
        case NextMove.EXPIRED:
            return Unknown("the key has expired at the server", last, expired=True)
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
    """How long to wait; None if no time is left, or a response if polling returned one."""
    if move is NextMove.POLL and isinstance(last, Reply):
        return (yield from _poll(call, last, patience, profile))
    return patience.while_working(last) if move is NextMove.WAIT else patience.after_failure(last)


def _moved(call: Call, last: Reply | Failure) -> str | None:
    location = last.field("Location") if isinstance(last, Reply) else None
    return None if location is None else same_origin(call, location)


def _poll(
    call: Call, accepted: Reply, patience: _Patience, profile: Profile
) -> Generator[Action, Reply | Failure | None, Reply | float | None]:
    """Poll the status resource until it is done: a response, or the delay before the key is sent again."""
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
            # oncekey's status resource only reports the state; the response is fetched with the key.
            ours = is_ours(accepted, profile) or is_status_of(seen, profile.key_of(call))
            fetch = ours or not _is_success(seen)
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
        asked = None if header is None else parse_retry_after(header, self._world.time())
        return self._within(self._rules.backoff.wait(failures, self._world.chance(), asked=asked))

    def _within(self, seconds: float) -> float | None:
        # A wait that ends after the deadline is not started: no attempt could follow it.
        return seconds if self._world.clock() + seconds < self._end else None


def drive(flow: Attempts, send: Callable[[Call], Reply | Failure], sleep: Callable[[float], object]) -> Outcome:
    """Run a flow in this thread."""
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
    """Asyncio version of `drive`."""
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


OPERATION_FIELD: Final = "Oncekey-Operation"
"""A header by which a caller names the operation in the journal. It is not sent."""

HOURS_23: Final = 23 * 3600.0
"""An hour less than the day for which servers usually store keys."""


def _new_key() -> str:
    return str(uuid4())


def _real_world() -> Surroundings:
    return Surroundings(clock=time.monotonic, time=time.time, chance=random.SystemRandom().random)


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call with its key in place, ready for any number of attempts."""

    key: str
    call: Call


@dataclass(frozen=True, slots=True)
class RetrySession:
    """Rules, journal and environment. `max_age`: seconds after which a key from the journal is no longer sent."""

    rules: RetryRules = field(default_factory=RetryRules)
    journal: Journal | None = None
    world: Surroundings = field(default_factory=_real_world)
    new_key: Callable[[], str] = _new_key
    max_age: float = HOURS_23

    def enrols(self, method: str) -> bool:
        """Whether requests of this method carry a key."""
        return method.upper() in self.rules.methods

    def begin(self, call: Call) -> KeyedCall | Reply:
        """Give the call its key, on disk if there is a journal; or return the response of an earlier call.

        Raises:
            RequestKeyReusedError: The journal has the key or the name for another request.
            RequestKeyExpiredError: The journal has the operation, but its key is too old to be sent.
        """
        name = call.field(OPERATION_FIELD)
        call = call.without(OPERATION_FIELD)
        profile = self.rules.profile
        given = profile.key_of(call)
        if given is not None and looks_personal(given):
            warnings.warn("an Idempotency-Key looks like personal data, but keys are logged", PersonalKeyWarning, 4)
        key = given or self.new_key()
        operation = KeyedCall(key, profile.put(call, key))
        if self.journal is None:
            return operation
        entry = self.journal.begin(call, key, name=name, profile=profile.name)
        if entry.reply is not None:
            return entry.reply
        return self._checked(self.journal, entry, profile.put(call, entry.key))

    def unfinished(self, only: Container[str] | None = None) -> list[JournalEntry]:
        """The entries of the journal without a response, for the APIs of this client; `only` names the keys."""
        if self.journal is None:
            raise ClientConfigurationError("resume needs a journal")
        ours = [entry for entry in self.journal.unfinished() if entry.profile == self.rules.profile.name]
        return [entry for entry in ours if only is None or entry.key in only]

    def take_up(self, entry: JournalEntry, call: Call) -> KeyedCall:
        """Resume an entry of the journal; `call` is its call, completed with headers that the journal lacks."""
        assert self.journal is not None
        return self._checked(self.journal, entry, self.rules.profile.put(call, entry.key))

    def tries(self, operation: KeyedCall) -> Attempts:
        """The flow for an adapter to drive."""
        return attempts(operation.call, self.rules, self.world)

    def conclude(self, operation: KeyedCall, outcome: Outcome) -> Reply | Failure:
        """Store the outcome and return it: a response, or a failure before anything was sent; otherwise raise.

        Raises:
            RequestKeyReusedError: The server has the key for another request.
            RequestOutcomeUnknownError: It may have happened.
        """
        key, journal = operation.key, self.journal
        match outcome:
            case Answered(reply):
                if journal is not None:
                    journal.answer(key, reply)
                return reply
            case Unsettled(last):
                # The entry stays open: the same key may still be sent.
                return last
            case Misused(reply):
                if journal is not None:
                    journal.answer(key, reply)
                raise RequestKeyReusedError(
                    "the key belongs to another request; it was not sent again", key=key, reply=reply
                )
            case Unknown(why, last, expired):
                if journal is not None:
                    journal.mark_unknown(key, why)
                kind = RequestKeyExpiredError if expired else RequestOutcomeUnknownError
                message = f"the operation may have happened: {why}"
                if isinstance(last, Failure):
                    raise kind(message, call=operation.call, key=key) from last.error
                raise kind(message, call=operation.call, key=key, reply=last)
            case _:
                assert_never(outcome)

    def _checked(self, journal: Journal, entry: JournalEntry, call: Call) -> KeyedCall:
        if journal.age(entry) > self.max_age:
            why = "its key is older than servers store keys"
            journal.mark_unknown(entry.key, why)
            raise RequestKeyExpiredError(f"the operation may have happened: {why}", call=call, key=entry.key)
        return KeyedCall(entry.key, call)
