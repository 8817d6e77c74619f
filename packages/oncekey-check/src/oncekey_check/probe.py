"""Sends the requests of every clause, counts them, and records them for the report.

Before the first clause `take_aim` determines whether the API can be checked, which keys it accepts, and how fast it is.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from threading import Thread
from typing import Final, NamedTuple

from oncekey_check import bodies, raw_http
from oncekey_check.bodies import Path, amount_at, is_same, volatile
from oncekey_check.carrier import ANY_UUID, KEY, MARKER
from oncekey_check.clauses import PLAIN, CheckProfile, Exchange, InconclusiveError, Need, SendMode, Way
from oncekey_check.errors import CheckError
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import Target, is_secret, replaced

_CONFLICT, _ACCEPTED, _LOCKED, _TOO_EARLY, _TOO_MANY, _UNAVAILABLE = 409, 202, 423, 425, 429, 503
_SERVER_ERROR: Final = 500
_GATEWAY: Final = frozenset({502, 503, 504})
_MOST_TRIES: Final = 20
_SHORTEST, _LONGEST = 0.05, 1.0
_LIMITED_TRIES, _LONGEST_WAIT = 4, 5.0
_SHORTEST_LAG, _LONGEST_LAG, _LAG_SAMPLES = 0.1, 3.0, 5
_LIMITED: Final = "the API limits the number of requests (429)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The general behaviour of an API, so that no clause reports it as a separate finding."""

    distinct: bool = True
    """The responses to two fresh keys differ, so an equal response is a replay."""
    replays: bool = True
    """A plain retry receives the first response, so another response is another operation."""
    protects: bool = True
    """A plain retry has no effect, as far as effects are counted."""
    optional: bool = False
    """A request without a key is executed."""
    opaque: bool = True
    """A key may be any text. If not, it has a fixed format: a UUID, in which case does not matter."""
    volatile: frozenset[Path] = frozenset()
    """Places whose values differ in every response, also in a replay."""
    compares: bool = True
    """Another body under a used key is refused."""
    free: Path | None = None
    """Where the body may have an extra member that the API accepts and compares."""


class Overlap(NamedTuple):
    """Two responses, the second to a request that was sent while the first one was running."""

    first: Answer
    second: Answer
    request: RawRequest
    """The first request, under the key of both."""
    before: int | None
    """The effects before both of them, if they are counted."""


class SilentError(Exception):
    """The API no longer responds, so nothing else can be judged."""


class Probe:
    """Sends the requests of one run. `trail` has the requests of the current clause."""

    def __init__(self, target: Target, *, quoted: bool, usual: int, latency: float, most: int) -> None:
        self.target = target
        self.usual = usual
        """The status of a success."""
        self.lead = min(max(3 * latency, 0.08), 0.5)
        """Seconds after which a request that was sent has certainly started."""
        self.habits = Habits()
        self.trail: list[Exchange] = []
        self.sent = 0
        self.refusal = ""
        """Why the API refused the last plain request under a fresh key; empty if it executed it."""
        self.effects: int | None = None
        """The highest number of effects that the current clause has counted."""
        self.lag = 0.0
        """Seconds for which the count must be stable before it is used; 0: it shows every effect at once."""
        self.lag_searched = False
        self._quoted = quoted
        self._most = most
        self._counts = 0
        self._owed = 0

    @property
    def blind(self) -> bool:
        """Whether a replay looks like an execution: responses are equal, and effects are not counted."""
        return not self.habits.distinct and self.target.count_address is None

    def same(self, first: Answer, again: Answer) -> bool:
        """Whether two responses report the same outcome."""
        return is_same(first, again, self.habits.volatile)

    # Keys and requests

    def fresh(self) -> str:
        """A new key, in the format that the API accepts; a UUID by default."""
        return self.target.key_format.fresh()

    @staticmethod
    def fresh_text() -> str:
        """A new key that is not a UUID, of the same length and characters."""
        return f"z{str(uuid.uuid4())[1:]}"

    def written(self, key: str) -> str:
        """A key in the form that this API accepts."""
        return f'"{key}"' if self._quoted else key

    def request(self, key: str | None, *, body: bytes | None = None, slow: bool = False) -> RawRequest:
        """The operation under a key, or without one."""
        return self.raw_request(*(() if key is None else (self.written(key),)), body=body, slow=slow)

    def raw_request(self, *values: str, body: bytes | None = None, slow: bool = False) -> RawRequest:
        """The operation with these values of the header, each on a separate line."""
        target = self.target
        lines = target.headers if not slow or target.slow is None else replaced(target.headers, (target.slow,))
        lines = (*lines, *((KEY, value) for value in values))
        return RawRequest(
            target.method, target.address, lines, target.body if body is None else body, carrier=target.carrier
        )

    def as_other_tenant(self, request: RawRequest) -> RawRequest:
        """The same request from another tenant; values in its body that must be unique differ."""
        return replace(request, headers=replaced(request.headers, self.target.other_tenant), salt="other tenant ")

    def as_same_caller(self, request: RawRequest) -> RawRequest:
        """The same request with the caller's other credentials."""
        return replace(request, headers=replaced(request.headers, self.target.same_caller))

    def as_nobody(self, request: RawRequest) -> RawRequest:
        """The same request without credentials."""
        return replace(request, headers=tuple(line for line in request.headers if not is_secret(line[0])))

    @property
    def other_body(self) -> bytes:
        """Another body that the API accepts."""
        if self.target.other_body is None:
            raise InconclusiveError("no other body is known that this API accepts", "--other-body")
        return self.target.other_body

    # Sending

    def send_raw(self, request: RawRequest) -> Answer:
        """Send a request."""
        return _within_limits(lambda: self._send_raw(request))

    def _send_raw(self, request: RawRequest, pause: float = 0.0) -> Answer:
        time.sleep(pause)
        mode = SendMode(seconds=pause)
        return self._noted([request], lambda: [raw_http.send_raw(request, self.target.timeout)], mode=mode)[0]

    def plain(self) -> Answer:
        """The response to a plain request under a fresh key; waits for a server that is being restarted.

        Raises:
            SilentError: There was no response within the target's patience.
        """
        ends, pause = time.monotonic() + self.target.patience, _SHORTEST
        while True:
            answer = self.control(self.request(self.fresh()))
            if answer.status and answer.status not in _GATEWAY:
                return answer
            if time.monotonic() > ends:
                break
            time.sleep(pause)
            pause = min(pause * 1.6, _LONGEST)
        if answer.status:
            return answer
        raise SilentError(f"the API stopped responding ({answer.reason})")

    def control(self, request: RawRequest) -> Answer:
        """Send a request that determines the API's general behaviour; the script of a finding leaves it out."""
        kept = list(self.trail)
        try:
            return self.send_raw(request)
        finally:
            self.trail = kept

    def send(self, key: str | None, *, body: bytes | None = None, slow: bool = False) -> Answer:
        """Send the operation under a key."""
        return self.send_raw(self.request(key, body=body, slow=slow))

    def first(self, key: str, *, body: bytes | None = None) -> Answer:
        """Send the operation under a fresh key; it must succeed, or the following requests prove nothing."""
        answer = self.send(key, body=body)
        if not answer.ok:
            raise InconclusiveError(f"a plain request with a fresh key received {answer.status or answer.reason}")
        self._owed += 1
        return answer

    def volley(self, many: Sequence[RawRequest]) -> list[Answer]:
        """Send requests at the same moment."""
        how, mode = f"{len(many)} at the same moment", SendMode(Way.TOGETHER, len(many))
        return self._noted(many, lambda: raw_http.volley(many, self.target.timeout), how, mode)

    def pipelined(self, many: Sequence[RawRequest]) -> list[Answer]:
        """Send requests at once on one connection."""
        how = "on one connection, without waiting"
        mode = SendMode(Way.PIPELINED, len(many))
        return self._noted(many, lambda: raw_http.pipelined(many, self.target.timeout), how, mode)

    def dribble(self, request: RawRequest) -> Answer:
        """Send a request slowly."""
        send = raw_http.dribble
        timeout, mode = self.target.timeout, SendMode(Way.SLOWLY, seconds=0.05)
        return self._noted(
            [request], lambda: [send(request, timeout, pieces=6, pause=0.05)], "the body in slow pieces", mode
        )[0]

    def cut_off(self, request: RawRequest, sent: int, *, stay: float = 0.0, listen: bool = False) -> None:
        """Send the first bytes of a request and disconnect."""
        whole = len(request.wire())
        how = f"disconnected after {min(sent, whole)} of {whole} bytes"

        def act() -> list[Answer]:
            try:
                raw_http.cut_off(request, self.target.timeout, sent=sent, stay=stay, listen=listen)
            except OSError as error:
                return [raw_http.silence(error)]
            return [raw_http.silence("the client disconnected")]

        self._noted([request], act, how, SendMode(Way.CUT, seconds=stay, sent=sent, listened=listen))

    def overlapping(self, one: RawRequest, two: RawRequest, *, counted: bool = False) -> Overlap:
        """Send the second request while the first is running, and check that they did overlap.

        If the first one had not started, or had ended already, the pair proves nothing: it is sent again under another
        key, and neither its requests nor its effects are part of a finding.
        """
        lead, limited, kept = self.lead, False, list(self.trail)
        for _ in range(3):
            before = self.count() if counted else None
            pair = _Pair(one, two, lead, self.target.timeout)
            mode = SendMode(Way.OVERLAPPING, 2, seconds=lead)
            first, second = self._noted([one, two], pair.send, f"the second {lead:.2f} s after the first", mode)
            limited = _TOO_MANY in {first.status, second.status}
            if pair.met and not limited:
                return Overlap(first, second, one, before)
            self.trail, key = list(kept), self.fresh()
            one, two = (self._rekeyed(request, key) for request in (one, two))
            lead = lead if limited else lead / 2
        if limited:
            raise InconclusiveError(_LIMITED)
        raise InconclusiveError("the first request ended before the second one was sent", "a slower --slow-header")

    def until_settled(self, request: RawRequest, *, over_errors: bool = False) -> Answer:
        """Retry while the response is that the first request is still running, up to a time limit.

        With `over_errors` a server error is retried as well: some servers return one while the first request is
        running, and the caller needs the response after that.
        """
        ends, pause = time.monotonic() + self.target.patience, _SHORTEST
        answer = self._send_raw(request)
        for _ in range(_MOST_TRIES):
            again = self.busy(answer) or (over_errors and (not answer.status or answer.status >= _SERVER_ERROR))
            if not again or time.monotonic() > ends:
                break
            answer = self._send_raw(request, min(pause, max(0.0, ends - time.monotonic())))
            pause = min(pause * 1.6, _LONGEST)
        return answer

    def busy(self, answer: Answer) -> bool:
        """Whether a response means that the client should retry later."""
        if answer.header(MARKER) == "true":
            return False
        statuses = {_CONFLICT, _LOCKED, _TOO_EARLY, _TOO_MANY, _UNAVAILABLE, _ACCEPTED} - {self.usual}
        return answer.status in statuses

    # Counting

    def count(self, *, other_tenant: bool = False) -> int | None:
        """The current number of effects; None without a `count_url`."""
        self._owed = 0
        found, ends = self._counted(other_tenant=other_tenant), time.monotonic() + self.target.patience
        while self.lag and found is not None:
            time.sleep(self.lag)
            before, found = found, self._counted(other_tenant=other_tenant)
            if before == found or time.monotonic() > ends:
                break
        return found

    def _counted(self, *, other_tenant: bool = False) -> int | None:
        target = self.target
        if target.count_address is None:
            return None
        lines = tuple(line for line in target.headers if line[0].lower() != "content-type")
        request = RawRequest("GET", target.count_address, lines)
        counting = self.as_other_tenant(request) if other_tenant else request
        answer = _within_limits(lambda: raw_http.send_raw(counting, target.timeout))
        self.sent, self._counts = self.sent + 1, self._counts + 1
        try:
            return amount_at(json.loads(answer.body), target.count_pointer)
        except ValueError as error:
            why = f"{error}" if answer.ok else f"the response was {answer.status or answer.reason}"
            raise InconclusiveError(f"effects could not be counted at {target.count_address}: {why}") from None

    def await_effect(self, before: int | None) -> bool:
        """Wait until the count shows an effect, and record how long it takes: a queue or a replica may lag.

        Returns False if it did not show it in time.
        """
        began, pause, late = time.monotonic(), _SHORTEST / 5, False
        while before is not None and self._counted() == before:
            if time.monotonic() - began > _LONGEST_LAG:
                return False
            late = True
            time.sleep(pause)
            pause = min(pause * 1.3, _LONGEST)
        if late:
            self.lag = max(self.lag, 2 * (time.monotonic() - began), _SHORTEST_LAG)
        return True

    def search_lag(self) -> bool:
        """Whether a count that seemed to show effects at once turns out to lag; checked once in a run."""
        known, searched, self.lag_searched = self.lag, self.lag_searched, True
        if searched or self.target.count_address is None:
            return False
        with suppress(InconclusiveError):  # the plain request after a failure detects an API that refuses by now
            for _ in range(_LAG_SAMPLES):
                before = self.count()
                if not self.control(self.request(self.fresh())).ok or not self.await_effect(before):
                    break
        return self.lag > known

    def since(self, before: int | None, *, at_least: int = 0) -> int | None:
        """How many effects there were since then; raises if the count does not show every success with a fresh key.

        A paginated list stops growing when its first page is full.
        """
        least = max(self._owed, at_least)
        now = self.count()
        if now is None or before is None:
            return None
        if now - before < least:
            raise InconclusiveError(f"the count at {self.target.count_address} does not show every success", Need.COUNT)
        self.effects = max(now - before, self.effects or 0)
        return now - before

    def recount(self) -> None:
        """Check that the count still moves, before a clause relies on an unchanged count."""
        before = self.count()
        if before is not None and self.control(self.request(self.fresh())).ok:
            self.since(before, at_least=1)

    def _rekeyed(self, request: RawRequest, key: str) -> RawRequest:
        return replace(request, headers=replaced(request.headers, ((KEY, self.written(key)),)))

    def _noted(
        self, many: Sequence[RawRequest], act: Callable[[], Sequence[Answer]], how: str = "", mode: SendMode = PLAIN
    ) -> list[Answer]:
        if self.sent - self._counts + len(many) > self._most:
            raise InconclusiveError(f"the run's {self._most} requests are used up")
        self.sent += len(many)
        answers = [replace(answer, headers=self.target.carrier.read(answer.headers)) for answer in act()]
        self.trail += [
            Exchange(request, answer, how or self._by_whom(request), mode)
            for request, answer in zip(many, answers, strict=True)
        ]
        return answers

    def _by_whom(self, request: RawRequest) -> str:
        """The caller of a request in words, if it is not the usual one: reports hide credentials."""
        if set(self.target.same_caller) & set(request.headers):
            return "with the renewed credentials"
        return "as the other tenant" if set(self.target.other_tenant) & set(request.headers) else ""


def _within_limits(send: Callable[[], Answer]) -> Answer:
    """Send, and if the API limits the number of requests, send again later: a rate limit is not about keys."""
    for _ in range(_LIMITED_TRIES):
        answer = send()
        if answer.status != _TOO_MANY:
            return answer
        advice = answer.header("Retry-After") or ""
        time.sleep(min(float(advice) if advice.isdecimal() else _LONGEST, _LONGEST_WAIT))
    raise InconclusiveError(_LIMITED)


class _Pair:
    """Two requests, the second shortly after the first."""

    def __init__(self, one: RawRequest, two: RawRequest, lead: float, timeout: float) -> None:
        self._requests = (one, two)
        self._lead, self._timeout = lead, timeout
        self._answers = [raw_http.silence("it could not be sent")] * 2
        self.met = True
        """Whether the first one had no response when the second was sent."""

    def send(self) -> list[Answer]:
        """Send both, and return their responses."""
        first = Thread(target=self._send_raw, args=(0,), daemon=True)
        first.start()
        first.join(self._lead)
        self.met = first.is_alive()
        self._send_raw(1)
        first.join()
        return self._answers

    def _send_raw(self, number: int) -> None:
        self._answers[number] = raw_http.send_raw(self._requests[number], self._timeout)


_SHOWN = 300
_MEMBER = "oncekey_check"
_TEXTS = ('"a"', '"b"')
_MOST_OBJECTS = 3
_MOST_OTHERS = 8


class CannotCheckError(CheckError):
    """The API cannot be checked with these options; the message says what was observed."""


def take_aim(target: Target, profile: CheckProfile, most: int) -> Probe:
    """A probe for this API, after a few requests that must succeed."""
    try:
        return _aimed(target, profile, most)
    except InconclusiveError as error:
        raise CannotCheckError(f"before the first clause, {error}") from None


def _aimed(target: Target, profile: CheckProfile, most: int) -> Probe:
    probe = None
    seen: list[Answer] = []
    bare = profile in {CheckProfile.STRIPE, CheckProfile.CONFLICT}
    for quoted in (not bare, bare):
        trial = Probe(target, quoted=quoted, usual=0, latency=0.0, most=most)
        try:
            before = trial.count()
        except InconclusiveError:
            before = None  # the response of the operation itself is more informative
        began = time.monotonic()
        answer = trial.send(trial.fresh())
        if not answer.status:
            raise CannotCheckError(f"{target.address} does not respond: {answer.reason}")
        if answer.ok:
            latency = time.monotonic() - began
            probe = Probe(target, quoted=quoted, usual=answer.status, latency=latency, most=most)
            probe.sent = trial.sent + len(seen)
            probe.lag = _SHORTEST_LAG if answer.status == _ACCEPTED else 0.0
            probe.await_effect(before)
            break
        seen.append(answer)
    if probe is None:
        raise CannotCheckError(_refusal(target, seen[0]))
    probe.habits = _habits(probe, answer)
    if probe.target.other_body is not None:
        _check_other_body(probe, probe.target.other_body)
    elif probe.target.is_json:
        _find_other_body(probe)
    if probe.target.is_json and probe.target.other_body is not None:
        _find_what_is_compared(probe, probe.target.other_body)
    return probe


def _habits(probe: Probe, first: Answer) -> Habits:
    """Determine the API's general behaviour, and check that one request raises the count by one."""
    key = probe.fresh()
    before = probe.count()
    second = probe.first(key)
    probe.await_effect(before)
    after = probe.count()
    effects = None if before is None or after is None else after - before
    if effects not in {None, 1}:
        raise CannotCheckError(
            f"one request with a fresh key changed the count at {probe.target.count_address} by {effects}, not by 1: "
            "choose a --count-url and --count-pointer that count all effects of this operation, and an API without "
            "other clients"
        )
    again = probe.send(key)
    together = probe.since(before)
    new = volatile(first, second, again)
    return Habits(
        distinct=not is_same(first, second, new),
        replays=is_same(second, again, new),
        protects=together in {None, 1},
        volatile=new,
        optional=probe.target.key_optional or probe.send_raw(probe.raw_request()).ok,
        opaque=probe.target.key_format == ANY_UUID and probe.send(probe.fresh_text()).ok,
    )


def _check_other_body(probe: Probe, body: bytes) -> None:
    answer = probe.send(probe.fresh(), body=body)
    if not answer.ok:
        raise CannotCheckError(f"--other-body was not accepted under a fresh key: {_shown(answer)}")


def _find_other_body(probe: Probe) -> None:
    """Find another body that the API accepts under its own key, so that a later refusal is about the key.

    Members are changed one after the other, until the API refuses a change under a used key; otherwise the first
    accepted change is used.
    """
    found = None
    for body in islice(bodies.others(probe.target.body), _MOST_OTHERS):
        if not probe.send(probe.fresh(), body=body).ok:
            continue
        found = found or body
        if _refused(probe, probe.target.body, body):
            found = body
            break
    probe.target = replace(probe.target, other_body=found)


def _find_what_is_compared(probe: Probe, other: bytes) -> None:
    """Determine whether another body is refused, and where the API accepts and compares an extra member."""
    compares = _refused(probe, probe.target.body, other)
    document = bodies.parsed(probe.target.body)
    objects = [path for path, value in bodies.containers(document) if isinstance(value, dict)]
    places = [(*path, _MEMBER) for path in objects[:_MOST_OBJECTS]] if compares else []
    taken = (path for path in places if _refused(probe, *(bodies.spelt(document, path, text) for text in _TEXTS)))
    probe.habits = replace(probe.habits, compares=compares, free=next(taken, None))


def _refused(probe: Probe, one: bytes, two: bytes) -> bool:
    """Whether the API accepts the first body, and refuses the second under the same key."""
    key = probe.fresh()
    return probe.send(key, body=one).ok and not probe.send(key, body=two).ok


def _refusal(target: Target, answer: Answer) -> str:
    return (
        f"{target.method} {target.address} with a fresh key must succeed before anything can be checked, but received "
        f"{_shown(answer)}"
    )


def _shown(answer: Answer) -> str:
    text = " ".join(answer.body.decode("utf-8", "replace").split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"{answer.status} {answer.reason}".strip() + (f": {shown}" if shown else "")
