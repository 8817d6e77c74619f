"""Fronts: caches of finished responses and of keys in progress, which are read before the store.

`Answering` is the protocol of a cache of finished responses, with three verbs: find, keep, forget. `recent.Answers`
implements it in the memory of a process, `SharedAnswers` in a Redis or Valkey that all processes share. `Holds` is the
shared cache of keys in progress. All of them follow four rules.

**Never authoritative.** A response is cached after its COMMIT was acknowledged, or after it was read from a committed
record; a key in progress is cached after the store granted the claim. Nothing is written before the store's reply. A
copy is judged by the same pure rules as a record. If a copy is missing, unreadable or too old, or the front does not
reply, the request reads the store as if there were no front.

**Sealed.** A name is a keyed hash of installation, scope and key, and a value is encrypted and authenticated under that
name (AES-GCM), with a key that is derived from the policy's secret. So a Redis server can read nothing, and a value
that it invents, truncates, or takes from another key, tenant or installation is rejected.

**Expiring by the store's clock.** A Redis can still return outdated values: a copy from before an operator's `bust`, or
from before a settlement. So each value contains, under the seal, the instant at which it expires: at most the front's
`life` after the store's reply, and never after the record's own expiry. `StoreClock` estimates the store's time.

**Removed in time.** `forget` writes a mark instead of deleting, and a request that fills in a response never replaces a
value. So a response that was read from the store before a bust cannot be filled in after it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from oncekey.canonical.digests import frame, raw
from oncekey.core.checks import LONGEST, Front
from oncekey.core.errors import ConfigurationError
from oncekey.core.fronts import (
    DROP,
    GET,
    KEEP,
    REPLACE,
    Command,
    FrontEntry,
    Held,
    StoreClock,
    entry_bytes,
    entry_of,
    held_bytes,
    held_of,
)
from oncekey.core.model import SECOND, Completed, Effects, Finished, Proceed, Replay
from oncekey.core.policy import InProgress, Policy, micros
from oncekey.core.rulings import rule_finished, rule_held
from oncekey.engine.actions import Consult, Interrupted, Life
from oncekey.engine.recent import Answers
from oncekey.engine.run import Breaker, Run
from oncekey.observe.events import Consulted, Found, Notify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from oncekey.core.model import Claim, Duration, Instant, RecordId, Refuse, Settlement, Verdict
    from oncekey.engine.claiming import ClaimInput
    from oncekey.engine.enrolment import Enrolment
    from oncekey.ports.store import FrontConnection

NEEDS_CRYPTOGRAPHY: Final = (
    "the content of a shared replay_cache or lock_hint is encrypted: pip install 'oncekey[encryption]'"
)
NO_TABLES: Final = "a replay_cache or lock_hint in Redis needs a SQL store: this store has no tables that identify it"
Said: TypeAlias = "list[bytes | None] | None"
"""The reply of a shared front to each command; None: it did not reply."""
ANSWER, HOLD = "a", "h"
GONE: Final = b"gone"
"""The mark in place of a removed response. It is not a sealed value, so its reader queries the store."""
_NONCE: Final = 12


class Answering(Protocol):
    """A cache of finished responses. Its verbs are flows, because a shared cache is read over the network."""

    def find(self, asked: Claim | ClaimInput, policy: Policy) -> Life[Replay | Refuse | None]:
        """The verdict on the key's copy, by the same rules as for a record. None: read the store."""

    def keep(self, replay: Replay, life: Duration) -> Life[None]:
        """Cache a response from the store, for at most `life`."""

    def forget(self, record_id: RecordId) -> Life[bool]:
        """Remove a response; False if it may still be sent until its life ends."""


class CacheCipher:
    """Names and seals the copies of one installation, with one secret."""

    __slots__ = ("_aead", "_identity", "_names", "_seals")

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._aead = _aead()
        self._identity = identity
        self._names = blake2b(secret, digest_size=32, person=b"oncekey names").digest()
        self._seals = blake2b(secret, digest_size=32, person=b"oncekey seals").digest()

    def name(self, kind: str, record_id: RecordId) -> bytes:
        """The name of a key's copy; without the secret it does not reveal the key."""
        parts = frame(self._identity, kind.encode(), raw(record_id.scope), raw(record_id.key))
        return b"oncekey:%b:%b" % (
            kind.encode(),
            blake2b(parts, digest_size=24, key=self._names).hexdigest().encode(),
        )

    def seal(self, name: bytes, plain: bytes) -> bytes:
        """Seal a value for this name only."""
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._cipher(name).encrypt(nonce, plain, name)
        return nonce + sealed

    def unseal(self, name: bytes, sealed: bytes) -> bytes | None:
        """The value that was sealed for this name; None if these bytes were not."""
        try:
            plain: bytes = self._cipher(name).decrypt(sealed[:_NONCE], sealed[_NONCE:], name)
        except Exception:  # noqa: BLE001  (a value that is not ours: too short, of another type, another seal)
            return None
        return plain

    def _cipher(self, name: bytes) -> Any:  # noqa: ANN401  (cryptography's, which is optional)
        # Each name has its own key, so random nonces do not repeat under one key, however many values are sealed.
        return self._aead(blake2b(name, digest_size=32, key=self._seals).digest())


def _aead() -> Any:  # noqa: ANN401  (cryptography's, which is optional)
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError(NEEDS_CRYPTOGRAPHY) from None
    return AESGCM


class SharedCache:
    """The copies of one kind in a shared front, with the clock of the store that they came from."""

    def __init__(
        self,
        setting: str,
        line: FrontConnection,
        vault: CacheCipher,
        *,
        clock: StoreClock,
        boot: Callable[[], float],
        notify: Notify | None = None,
    ) -> None:
        self.line = line
        self.vault = vault
        self._setting = setting
        self._clock = clock
        self._boot = boot
        self._notify = notify

    def now(self) -> Instant | None:
        """The latest instant that the store's clock may show; None: unknown until the store has replied."""
        return self._clock.latest(self._boot())

    def since(self, moment: float) -> Instant | None:
        """The earliest instant that the store's clock may have shown at a moment of this process's clock."""
        return self._clock.earliest(moment)

    def opened(self, name: bytes, found_now: Said) -> bytes | None:
        """The unsealed value in the front's reply; None if there is none, or its seal is not valid."""
        if found_now is None:
            self.report_found(Found.UNAVAILABLE)
            return None
        (sealed,) = found_now
        if sealed is None or sealed == GONE:
            self.report_found(Found.NOTHING)
            return None
        plain = self.vault.unseal(name, sealed)
        if plain is None:
            self.report_found(Found.REFUSED)
        return plain

    def believed(self, until: Instant | None) -> Instant | None:
        """The store's time if a copy that expires at `until` is still valid; otherwise None."""
        now = self.now()
        if until is None:
            self.report_found(Found.REFUSED)
            return None
        if now is None or now >= until:
            self.report_found(Found.STALE)
            return None
        self.report_found(Found.HIT)
        return now

    def put(self, verb: bytes, name: bytes, plain: bytes, life: Duration) -> Life[None]:
        """Write a copy, without waiting for the reply."""
        yield Consult(self.line, (Command(verb, name, self.vault.seal(name, plain), life),), wait=False)

    def report_found(self, found: Found) -> None:
        """Report the result of a lookup to the observers."""
        if self._notify is not None:
            self._notify(Consulted(self._setting, found))


class SharedAnswers:
    """Finished responses in a front that several processes share."""

    def __init__(self, shelf: SharedCache) -> None:
        self.shelf = shelf

    def find(self, asked: Claim | ClaimInput, policy: Policy) -> Life[Replay | Refuse | None]:
        """The verdict on the copy, if there is a valid one."""
        if self.shelf.now() is None:
            return None
        name = self.name(asked)
        found_now: Said = yield Consult(self.shelf.line, (Command(GET, name),))
        return self.read(name, found_now, asked, policy)

    def name(self, asked: Claim | ClaimInput) -> bytes:
        """The name of the copy of a key's response."""
        return self.shelf.vault.name(ANSWER, asked.id)

    def read(self, name: bytes, found_now: Said, asked: Claim | ClaimInput, policy: Policy) -> Replay | Refuse | None:
        """The verdict on the front's reply."""
        plain = self.shelf.opened(name, found_now)
        if plain is None:
            return None
        entry = entry_of(plain, asked.id)
        now = self.shelf.believed(None if entry is None else entry.until)
        if entry is None or now is None:
            return None
        return rule_finished(entry.finished, max(now, entry.read_at), asked.fingerprint, policy)

    def keep(self, replay: Replay, life: Duration) -> Life[None]:
        """Cache the response, unless there is a value already: an equal copy, or the mark of a bust."""
        record, now = replay.record, replay.now
        until = min(now + life, record.expires_at)
        if until > now:
            name = self.shelf.vault.name(ANSWER, record.id)
            yield from self.shelf.put(KEEP, name, entry_bytes(FrontEntry(record, now, until)), until - now)

    def forget(self, record_id: RecordId) -> Life[bool]:
        """Write the mark for as long as a response that was read earlier could be filled in and be valid."""
        name = self.shelf.vault.name(ANSWER, record_id)
        mark = Command(REPLACE, name, GONE, micros(LONGEST))
        found_now: Said = yield Consult(self.shelf.line, (mark, Command(GET, name)))
        return found_now is not None and found_now[-1] == GONE


class Holds:
    """Keys in progress, in a front that several processes share: duplicates are refused without reading the store."""

    def __init__(self, shelf: SharedCache) -> None:
        self.shelf = shelf

    def find(self, asked: Claim) -> Life[Refuse | None]:
        """The refusal of a duplicate whose key is in progress according to the front. None: read the store."""
        if self.shelf.now() is None:
            return None
        name = self.name(asked)
        found_now: Said = yield Consult(self.shelf.line, (Command(GET, name),))
        return self.read(name, found_now, asked)

    def name(self, asked: Claim) -> bytes:
        """The name of the note that a key is in progress."""
        return self.shelf.vault.name(HOLD, asked.id)

    def read(self, name: bytes, found_now: Said, asked: Claim) -> Refuse | None:
        """The refusal according to the front's reply, if any."""
        plain = self.shelf.opened(name, found_now)
        if plain is None:
            return None
        held = held_of(plain)
        now = self.shelf.believed(None if held is None else held.until)
        if held is None or now is None:
            return None
        return rule_held(held, max(now, held.begun), asked.fingerprint)

    def hold(self, run: Run, life: Duration) -> Life[None]:
        """Note that the store granted the key, until its lease ends at the latest."""
        lease, now = run.lease, run.now or self.shelf.since(run.asked_at)
        assert lease is not None
        if now is None:
            return
        # LOCAL in one commit has a lock and no lease, and its BEGIN may not have returned the store's clock.
        until = now + life if run.one_commit is not None else min(now + life, lease.lease_until)
        held = Held(run.claim.fingerprint, now, None if run.one_commit is not None else lease.lease_until, until)
        run.front_note = name = self.shelf.vault.name(HOLD, run.claim.id)
        yield from self.shelf.put(REPLACE, name, held_bytes(held), until - now)

    def let_go(self, name: bytes) -> Life[None]:
        """Remove the note and wait for the reply: a client that has its response must not get "in progress" next."""
        yield Consult(self.shelf.line, (Command(DROP, name),))


class RouteFronts:
    """The fronts of one route, for one request."""

    __slots__ = ("_answers", "_fronts", "_holds", "_policy", "moment")

    def __init__(self, fronts: Fronts, policy: Policy, answers: Answering | None, holds: Holds | None) -> None:
        self.moment = fronts.moment
        """The clock, read before the store is queried."""
        self._fronts = fronts
        self._policy = policy
        self._answers = answers
        self._holds = holds

    def find(self, run: Run) -> Life[Replay | Refuse | None]:
        """The verdict of the fronts, if they have one."""
        answers, holds, claim = self._answers, self._holds, run.claim
        if isinstance(answers, SharedAnswers) and holds is not None and answers.shelf.line is holds.shelf.line:
            return (yield from self._both(answers, holds, claim))
        known = None if answers is None else (yield from answers.find(claim, self._policy))
        return known if known is not None or holds is None else (yield from holds.find(claim))

    def _both(self, answers: SharedAnswers, holds: Holds, claim: Claim) -> Life[Replay | Refuse | None]:
        """Read both in one message: most requests are new, and need both replies."""
        if answers.shelf.now() is None:
            return None
        one, other = answers.name(claim), holds.name(claim)
        found_now: Said = yield Consult(answers.shelf.line, (Command(GET, one), Command(GET, other)))
        known = answers.read(one, None if found_now is None else found_now[:1], claim, self._policy)
        return known or holds.read(other, None if found_now is None else found_now[1:], claim)

    def note_verdict(self, run: Run, verdict: Verdict) -> Life[None]:
        """Take the clock and the stored response, if any, from the store's verdict."""
        if isinstance(verdict, Replay | Proceed):
            yield from self._fronts.note_verdict(verdict, self._policy, run.asked_at)

    def settled(self, run: Run, settlement: Settlement | None) -> Life[None]:
        """Cache the committed settlement (None: the record has another outcome), and remove the note."""
        cache = self._policy.replay_cache
        try:
            if isinstance(settlement, Completed) and run.expires_at is not None:
                now = self._fronts.sealed(run)
                if now is not None and self._answers is not None and cache is not None and cache.shared:
                    # Other processes would read it from the store. An operator cannot bust a response before it exists.
                    finished = _finished(run, settlement, run.expires_at)
                    yield from self._answers.keep(Replay(finished, now), cache.span)
            if self._holds is not None and run.front_note is not None:
                yield from self._holds.let_go(run.front_note)
        except Interrupted:
            return  # the handler was executed, so the flow continues to its response

    def hold(self, run: Run) -> Life[None]:
        """Note in the front that the store granted the key to this operation."""
        if self._holds is not None and self._policy.lock_hint is not None:
            yield from self._holds.hold(run, self._policy.lock_hint.span)


def _finished(run: Run, settlement: Completed, expires_at: Instant) -> Finished:
    """The record of an operation, as a retry will read it."""
    lease, claim = run.lease, run.claim
    assert lease is not None
    operation = claim.operation if run.record is None else run.record.operation  # a new key in one commit has no record
    return Finished(
        lease.id, lease.incarnation, operation, lease.effects, claim.fingerprint, settlement.response, expires_at
    )


class Fronts:
    """All fronts of one installation in one process. `connect` creates the connection to a shared one."""

    def __init__(
        self, boot: Callable[[], float], connect: Callable[[Front, Breaker], FrontConnection] | None = None
    ) -> None:
        self.identity: bytes | None = None
        """The identity of the installation; None until the store was checked: until then no shared front is used."""
        self.notify: Notify | None = None
        self.lines: dict[str, FrontConnection] = {}
        self.moment = boot
        """Seconds since an arbitrary start, by a clock that continues while the machine sleeps."""
        self._connect = connect
        self._memory: Answers | None = None
        self._clock = StoreClock()
        self._routes: dict[int, tuple[Enrolment, RouteFronts | None]] = {}
        self._caches: dict[int, tuple[Policy, Answering | None]] = {}

    def anew(self) -> Fronts:
        """The same fronts for a forked process; the parent's connections and locks are not touched."""
        return Fronts(self.moment, self._connect)

    def note_verdict(self, verdict: Replay | Proceed, policy: Policy, asked: float) -> Life[None]:
        """Take the store's clock from a verdict, and the stored response if it has one."""
        if verdict.now:  # BEGIN with a new key returns no clock
            self._clock.adjust(verdict.now, verdict.now, asked, self.moment())
        answers = None if policy.replay_cache is None else self.answers(policy)
        if answers is not None and policy.replay_cache is not None and isinstance(verdict, Replay):
            yield from answers.keep(verdict, policy.replay_cache.span)

    def sealed(self, run: Run) -> Instant | None:
        """The store's clock when a now committed operation was admitted; None: unknown."""
        if run.now:
            return run.now
        if run.one_commit is not None and run.one_commit.target.seen is None and run.expires_at is not None:
            # The record's expiry reveals when it was written, to the second.
            written = run.expires_at - run.claim.ttl
            self._clock.adjust(written, written + SECOND, run.asked_at, self.moment())
        return self._clock.earliest(run.asked_at)

    def forget(self, policies: Iterable[Policy], record_id: RecordId) -> Life[bool]:
        """Remove a response from all fronts, before it is busted in the store; False if that is not certain."""
        certain = True
        known = {(policy.replay_cache, policy.secret): policy for policy in policies if policy.replay_cache is not None}
        for policy in known.values():
            answers = self.answers(policy)
            certain = answers is not None and (yield from answers.forget(record_id)) and certain
        return certain

    def of(self, enrolment: Enrolment) -> RouteFronts | None:
        """The fronts for an operation, if it has any."""
        found = self._routes.get(id(enrolment))
        if found is None or (found[1] is None and self.identity is not None):
            found = self._routes[id(enrolment)] = enrolment, self._beside(enrolment)
        return found[1]

    def answers(self, policy: Policy) -> Answering | None:
        """The cache of finished responses that a policy configures."""
        found = self._caches.get(id(policy))
        if found is None or (found[1] is None and self.identity is not None):
            found = self._caches[id(policy)] = policy, self._answering(policy)
        return found[1]

    def _beside(self, enrolment: Enrolment) -> RouteFronts | None:
        policy, holds = enrolment.policy, None
        # A waiting request polls the store; a route with limits counts each request there; and the 202 of an OUTBOX
        # request comes from its record.
        if not (policy.on_in_progress is InProgress.WAIT or enrolment.limited or enrolment.effects is Effects.OUTBOX):
            holds = self._holding(policy)
        answers = self.answers(policy)
        return None if answers is None and holds is None else RouteFronts(self, policy, answers, holds)

    def _answering(self, policy: Policy) -> Answering | None:
        front = policy.replay_cache
        if front is None:
            return None
        if not front.shared:
            self._memory = self._memory or Answers(self.moment, self.notify)
            return self._memory
        shelf = self._shelf("replay_cache", front, policy)
        return None if shelf is None else SharedAnswers(shelf)

    def _holding(self, policy: Policy) -> Holds | None:
        shelf = None if policy.lock_hint is None else self._shelf("lock_hint", policy.lock_hint, policy)
        return None if shelf is None else Holds(shelf)

    def _shelf(self, setting: str, front: Front, policy: Policy) -> SharedCache | None:
        if self.identity is None or policy.secret is None:
            return None
        vault = CacheCipher(policy.secret, self.identity)
        line = self._line(front)
        return SharedCache(setting, line, vault, clock=self._clock, boot=self.moment, notify=self.notify)

    def _line(self, front: Front) -> FrontConnection:
        assert self._connect is not None
        # A line connects on first use, so if two threads create one at the same time, the second one is never used.
        return self.lines.get(front.place) or self.lines.setdefault(front.place, self._connect(front, Breaker()))


def check_fronts(policies: Iterable[Policy], identity: bytes | None) -> None:
    """Refuse an unusable shared front at start-up, and not at the first request."""
    fronts = [front for policy in policies for front in (policy.replay_cache, policy.lock_hint)]
    if not any(front is not None and front.shared for front in fronts):
        return
    if find_spec("redis") is None:
        raise ConfigurationError("redis is not installed: pip install 'oncekey[redis,encryption]'")
    _aead()
    if identity is None:
        raise ConfigurationError(NO_TABLES)
