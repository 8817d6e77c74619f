"""What stands in front of the store: finished answers, and keys in somebody's hands, as far as somebody remembers.

`Answering` is the one protocol of a cache of finished answers, with three verbs: find, keep, forget. `recent.Answers`
does it in the memory of a process, `SharedAnswers` in a Redis or Valkey that all processes share. `Holds` is the memory
of keys that are being worked on. Both live by four rules.

**Never authoritative.** An answer is kept when its COMMIT was answered or when it was read from a committed record, and
a key is held when the store has granted it: nothing is written before the store has said so. What is found goes through
the same pure rules as what the store says. What is not found, not readable, too old or not there at all is asked of the
store, as if there were no front.

**Sealed.** A name is a keyed hash of installation, scope and key, and a value is encrypted and authenticated under that
very name (AES-GCM), with a key that is derived from the policy's secret. So a Redis that invents a value, cuts one off,
or gives another key's, another tenant's or another installation's is found out, and reads nothing itself.

**Ending by the store's clock.** A Redis can still give what was true once: a copy from before an operator's `bust`, or
from before a settlement. So each value says, under the seal, until when it is believed: never longer than the front's
`life` after the store said it, and never past the record's own end; `StoreClock` tells what time it is there.

**Taken away in time.** `forget` leaves a mark instead of nothing, and who fills in an answer never replaces what is
there. So what was read from the store before a bust cannot be filled in after it.
"""

from __future__ import annotations

import os
from hashlib import blake2b, sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from oncekey.core.choices import InProgress
from oncekey.core.digests import frame, raw
from oncekey.core.errors import ConfigurationError
from oncekey.core.fronts import (
    DROP,
    GET,
    KEEP,
    LONGEST,
    REPLACE,
    Command,
    Entry,
    Held,
    StoreClock,
    entry_bytes,
    entry_of,
    held_bytes,
    held_of,
)
from oncekey.core.model import SECOND, Completed, Effects, Finished, Proceed, Replay
from oncekey.core.policy import micros
from oncekey.core.rulings import rule_finished, rule_held
from oncekey.engine.breaker import Breaker
from oncekey.engine.effects import Consult, Interrupted
from oncekey.engine.recent import Answers
from oncekey.observe.events import Consulted, Found

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from oncekey.core.fronts import Front
    from oncekey.core.migrations import Applied
    from oncekey.core.model import Claim, Duration, Instant, RecordId, Refuse, Settlement, Verdict
    from oncekey.core.policy import Policy
    from oncekey.engine.claiming import Question
    from oncekey.engine.effects import Life, Line
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.run import Run
    from oncekey.observe.events import Tell

NEEDS_CRYPTOGRAPHY: Final = (
    "what is kept in a shared replay_cache or lock_hint is sealed: pip install 'oncekey[encryption]'"
)
NO_TABLES: Final = (
    "a replay_cache or lock_hint at a Redis stands in front of a SQL store; this one has no tables to know it by"
)
Said: TypeAlias = "list[bytes | None] | None"
"""What a shared memory says to each command; None: nothing at all."""
ANSWER, HOLD = "a", "h"
GONE: Final = b"gone"
"""What stands where an answer was taken away: no sealed value, so whoever reads it asks the store."""
EARLIEST: Final = 3
"""An installation is known by when its first migrations were run."""
_NONCE: Final = 12


class Answering(Protocol):
    """A cache of finished answers. Its verbs are flows, because a shared one is asked over a line."""

    def find(self, asked: Claim | Question, policy: Policy) -> Life[Replay | Refuse | None]:
        """What the record of a key says, by the same rules as if the store had said it. None: ask the store."""

    def keep(self, replay: Replay, life: Duration) -> Life[None]:
        """Keep what the store has said, for at most so long."""

    def forget(self, record_id: RecordId) -> Life[bool]:
        """Give it no more; False where that is not certain before its life is over."""


def identity_of(applied: Iterable[Applied]) -> bytes | None:
    """What tells this installation's tables from all others; None where there are none."""
    lines = [b"%d:%d" % (one.number, one.applied_at) for one in applied if one.number <= EARLIEST]
    return sha256(frame(*lines)).digest() if lines else None


class Vault:
    """The names and the seals of one installation under one secret."""

    __slots__ = ("_aead", "_identity", "_names", "_seals")

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._aead = _aead()
        self._identity = identity
        self._names = blake2b(secret, digest_size=32, person=b"oncekey names").digest()
        self._seals = blake2b(secret, digest_size=32, person=b"oncekey seals").digest()

    def name(self, kind: str, record_id: RecordId) -> bytes:
        """Where something about a key lies. Nobody without the secret can tell which key that is."""
        parts = frame(self._identity, kind.encode(), raw(record_id.scope), raw(record_id.key))
        return b"oncekey:%b:%b" % (
            kind.encode(),
            blake2b(parts, digest_size=24, key=self._names).hexdigest().encode(),
        )

    def seal(self, name: bytes, plain: bytes) -> bytes:
        """A value for this name, and for no other one."""
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._cipher(name).encrypt(nonce, plain, name)
        return nonce + sealed

    def unseal(self, name: bytes, sealed: bytes) -> bytes | None:
        """What was sealed for this name; None: whatever this is, it was not."""
        try:
            plain: bytes = self._cipher(name).decrypt(sealed[:_NONCE], sealed[_NONCE:], name)
        except Exception:  # noqa: BLE001  (a value that is not ours: too short, of another type, another seal)
            return None
        return plain

    def _cipher(self, name: bytes) -> Any:  # noqa: ANN401  (cryptography's, which is optional)
        # A key for each name: however many values are sealed, random nonces under one key do not meet.
        return self._aead(blake2b(name, digest_size=32, key=self._seals).digest())


def _aead() -> Any:  # noqa: ANN401  (cryptography's, which is optional)
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError(NEEDS_CRYPTOGRAPHY) from None
    return AESGCM


class Shelf:
    """Where one kind of copies lies in a shared memory, and what time it is in the store they were taken from."""

    def __init__(
        self,
        setting: str,
        line: Line,
        vault: Vault,
        *,
        clock: StoreClock,
        boot: Callable[[], float],
        tell: Tell | None = None,
    ) -> None:
        self.line = line
        self.vault = vault
        self._setting = setting
        self._clock = clock
        self._boot = boot
        self._tell = tell

    def now(self) -> Instant | None:
        """The latest that it can be in the store; None: the store has to be asked, and says that with its answer."""
        return self._clock.latest(self._boot())

    def since(self, moment: float) -> Instant | None:
        """The earliest that it can have been in the store, at a moment of this process."""
        return self._clock.earliest(moment)

    def opened(self, name: bytes, said: Said) -> bytes | None:
        """What was put there under this name by one of us. None: nothing, or nothing that we can know that of."""
        if said is None:
            self.told(Found.UNAVAILABLE)
            return None
        (sealed,) = said
        if sealed is None or sealed == GONE:
            self.told(Found.NOTHING)
            return None
        plain = self.vault.unseal(name, sealed)
        if plain is None:
            self.told(Found.REFUSED)
        return plain

    def believed(self, until: Instant | None) -> Instant | None:
        """The time in the store, if something is believed still; None: it is not, or never was to be."""
        now = self.now()
        if until is None:
            self.told(Found.REFUSED)
            return None
        if now is None or now >= until:
            self.told(Found.STALE)
            return None
        self.told(Found.HIT)
        return now

    def put(self, verb: bytes, name: bytes, plain: bytes, life: Duration) -> Life[None]:
        """Put something there, and do not wait for it."""
        yield Consult(self.line, (Command(verb, name, self.vault.seal(name, plain), life),), wait=False)

    def told(self, found: Found) -> None:
        """Tell those who observe."""
        if self._tell is not None:
            self._tell(Consulted(self._setting, found))


class SharedAnswers:
    """Finished answers in a memory that several processes share."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def find(self, asked: Claim | Question, policy: Policy) -> Life[Replay | Refuse | None]:
        """What an entry says that is believed still."""
        if self.shelf.now() is None:
            return None
        name = self.name(asked)
        said: Said = yield Consult(self.shelf.line, (Command(GET, name),))
        return self.read(name, said, asked, policy)

    def name(self, asked: Claim | Question) -> bytes:
        """Where the answer of a key lies."""
        return self.shelf.vault.name(ANSWER, asked.id)

    def read(self, name: bytes, said: Said, asked: Claim | Question, policy: Policy) -> Replay | Refuse | None:
        """What it means."""
        plain = self.shelf.opened(name, said)
        if plain is None:
            return None
        entry = entry_of(plain, asked.id)
        now = self.shelf.believed(None if entry is None else entry.until)
        if entry is None or now is None:
            return None
        return rule_finished(entry.finished, max(now, entry.read_at), asked.fingerprint, policy)

    def keep(self, replay: Replay, life: Duration) -> Life[None]:
        """Keep it, unless something is there already: an entry that is as good, or the mark of a bust."""
        record, now = replay.record, replay.now
        until = min(now + life, record.expires_at)
        if until > now:
            name = self.shelf.vault.name(ANSWER, record.id)
            yield from self.shelf.put(KEEP, name, entry_bytes(Entry(record, now, until)), until - now)

    def forget(self, record_id: RecordId) -> Life[bool]:
        """Leave the mark, for as long as anything that was read before could be filled in and believed."""
        name = self.shelf.vault.name(ANSWER, record_id)
        mark = Command(REPLACE, name, GONE, micros(LONGEST))
        said: Said = yield Consult(self.shelf.line, (mark, Command(GET, name)))
        return said is not None and said[-1] == GONE


class Holds:
    """Keys in somebody's hands, in a memory that several processes share: their duplicates need not ask the store."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def find(self, asked: Claim) -> Life[Refuse | None]:
        """That the same request is under way, if somebody said so a moment ago. None: ask the store."""
        if self.shelf.now() is None:
            return None
        name = self.name(asked)
        said: Said = yield Consult(self.shelf.line, (Command(GET, name),))
        return self.read(name, said, asked)

    def name(self, asked: Claim) -> bytes:
        """Where it lies that a key is in somebody's hands."""
        return self.shelf.vault.name(HOLD, asked.id)

    def read(self, name: bytes, said: Said, asked: Claim) -> Refuse | None:
        """What it means."""
        plain = self.shelf.opened(name, said)
        if plain is None:
            return None
        held = held_of(plain)
        now = self.shelf.believed(None if held is None else held.until)
        if held is None or now is None:
            return None
        return rule_held(held, max(now, held.begun), asked.fingerprint)

    def hold(self, run: Run, life: Duration) -> Life[None]:
        """The store has granted the key: say so, until its lease is over at the latest."""
        lease, now = run.lease, run.now or self.shelf.since(run.asked_at)
        assert lease is not None
        if now is None:
            return
        # LOCAL in one commit has a lock and no lease, and perhaps it was not told the time.
        until = now + life if run.go is not None else min(now + life, lease.lease_until)
        held = Held(run.claim.fingerprint, now, None if run.go is not None else lease.lease_until, until)
        run.held = name = self.shelf.vault.name(HOLD, run.claim.id)
        yield from self.shelf.put(REPLACE, name, held_bytes(held), until - now)

    def let_go(self, name: bytes) -> Life[None]:
        """It is settled. Who hears the answer and asks again must not be told that it is under way: so this waits."""
        yield Consult(self.shelf.line, (Command(DROP, name),))


class Beside:
    """What stands in front of the store on one route."""

    __slots__ = ("_answers", "_fronts", "_holds", "_policy", "moment")

    def __init__(self, fronts: Fronts, policy: Policy, answers: Answering | None, holds: Holds | None) -> None:
        self.moment = fronts.moment
        """This moment, before the store is asked."""
        self._fronts = fronts
        self._policy = policy
        self._answers = answers
        self._holds = holds

    def find(self, run: Run) -> Life[Replay | Refuse | None]:
        """What is known without the store."""
        answers, holds, claim = self._answers, self._holds, run.claim
        if isinstance(answers, SharedAnswers) and holds is not None and answers.shelf.line is holds.shelf.line:
            return (yield from self._both(answers, holds, claim))
        known = None if answers is None else (yield from answers.find(claim, self._policy))
        return known if known is not None or holds is None else (yield from holds.find(claim))

    def _both(self, answers: SharedAnswers, holds: Holds, claim: Claim) -> Life[Replay | Refuse | None]:
        """Both in one question, because most requests are new, and wait for it."""
        if answers.shelf.now() is None:
            return None
        one, other = answers.name(claim), holds.name(claim)
        said: Said = yield Consult(answers.shelf.line, (Command(GET, one), Command(GET, other)))
        known = answers.read(one, None if said is None else said[:1], claim, self._policy)
        return known or holds.read(other, None if said is None else said[1:], claim)

    def heard(self, run: Run, verdict: Verdict) -> Life[None]:
        """The store has spoken."""
        if isinstance(verdict, Replay | Proceed):
            yield from self._fronts.heard(verdict, self._policy, run.asked_at)

    def settled(self, run: Run, settlement: Settlement | None) -> Life[None]:
        """The operation is over; what it came to is committed, or None: the record says something else."""
        cache = self._policy.replay_cache
        try:
            if isinstance(settlement, Completed) and run.expires_at is not None:
                now = self._fronts.sealed(run)
                if now is not None and self._answers is not None and cache is not None and cache.shared:
                    # Others would ask the store for it. No answer is taken away before its operation was let in.
                    finished = _finished(run, settlement, run.expires_at)
                    yield from self._answers.keep(Replay(finished, now), cache.span)
            if self._holds is not None and run.held is not None:
                yield from self._holds.let_go(run.held)
        except Interrupted:
            return  # what was executed is answered all the same

    def hold(self, run: Run) -> Life[None]:
        """The key is granted to this operation."""
        if self._holds is not None and self._policy.lock_hint is not None:
            yield from self._holds.hold(run, self._policy.lock_hint.span)


def _finished(run: Run, settlement: Completed, expires_at: Instant) -> Finished:
    """The record of an operation as a repeat reads it from now on."""
    lease, claim = run.lease, run.claim
    assert lease is not None
    operation = claim.operation if run.record is None else run.record.operation  # a new key in one commit has no record
    return Finished(
        lease.id, lease.incarnation, operation, lease.effects, claim.fingerprint, settlement.response, expires_at
    )


class Fronts:
    """All fronts of one installation in one process. `connect` makes the line to a shared one."""

    def __init__(self, boot: Callable[[], float], connect: Callable[[Front, Breaker], Line] | None = None) -> None:
        self.identity: bytes | None = None
        """Which installation it is; None until the store has said so, and a shared memory is left alone."""
        self.tell: Tell | None = None
        self.lines: dict[str, Line] = {}
        self.moment = boot
        """Seconds that go on while the machine sleeps, from any start."""
        self._connect = connect
        self._memory: Answers | None = None
        self._clock = StoreClock()
        self._routes: dict[int, tuple[Enrolment, Beside | None]] = {}
        self._caches: dict[int, tuple[Policy, Answering | None]] = {}

    def anew(self) -> Fronts:
        """The same for a process that was forked: lines and locks are the parent's, and stay as they are."""
        return Fronts(self.moment, self._connect)

    def heard(self, verdict: Replay | Proceed, policy: Policy, asked: float) -> Life[None]:
        """The store has said what time it is there, and perhaps a stored answer."""
        if verdict.now:  # a new key that is found in the message of BEGIN is not told the time
            self._clock.heard(verdict.now, verdict.now, asked, self.moment())
        answers = None if policy.replay_cache is None else self.answers(policy)
        if answers is not None and policy.replay_cache is not None and isinstance(verdict, Replay):
            yield from answers.keep(verdict, policy.replay_cache.span)

    def sealed(self, run: Run) -> Instant | None:
        """The store's clock when an operation was let in that is committed now; None: that is not known."""
        if run.now:
            return run.now
        if run.go is not None and run.go.ground.seen is None and run.expires_at is not None:
            # The record's end says when it was written, to the second.
            written = run.expires_at - run.claim.ttl
            self._clock.heard(written, written + SECOND, run.asked_at, self.moment())
        return self._clock.earliest(run.asked_at)

    def forget(self, policies: Iterable[Policy], record_id: RecordId) -> Life[bool]:
        """Give a stored answer no more, here and in what is shared; False where that is not certain.

        It comes before the answer is taken away in the store: what is read from there until then cannot be filled in.
        """
        certain = True
        known = {(policy.replay_cache, policy.secret): policy for policy in policies if policy.replay_cache is not None}
        for policy in known.values():
            answers = self.answers(policy)
            certain = answers is not None and (yield from answers.forget(record_id)) and certain
        return certain

    def of(self, enrolment: Enrolment) -> Beside | None:
        """What stands in front of the store for an operation."""
        found = self._routes.get(id(enrolment))
        if found is None or (found[1] is None and self.identity is not None):
            found = self._routes[id(enrolment)] = enrolment, self._beside(enrolment)
        return found[1]

    def answers(self, policy: Policy) -> Answering | None:
        """The cache of finished answers that a policy allows."""
        found = self._caches.get(id(policy))
        if found is None or (found[1] is None and self.identity is not None):
            found = self._caches[id(policy)] = policy, self._answering(policy)
        return found[1]

    def _beside(self, enrolment: Enrolment) -> Beside | None:
        policy, holds = enrolment.policy, None
        # Who waits asks the store again and again; a route with limits counts each request there; and what is handed
        # to the outbox is answered 202 by its record.
        if not (policy.on_in_progress is InProgress.WAIT or enrolment.limited or enrolment.effects is Effects.OUTBOX):
            holds = self._holding(policy)
        answers = self.answers(policy)
        return None if answers is None and holds is None else Beside(self, policy, answers, holds)

    def _answering(self, policy: Policy) -> Answering | None:
        front = policy.replay_cache
        if front is None:
            return None
        if not front.shared:
            self._memory = self._memory or Answers(self.moment, self.tell)
            return self._memory
        shelf = self._shelf("replay_cache", front, policy)
        return None if shelf is None else SharedAnswers(shelf)

    def _holding(self, policy: Policy) -> Holds | None:
        shelf = None if policy.lock_hint is None else self._shelf("lock_hint", policy.lock_hint, policy)
        return None if shelf is None else Holds(shelf)

    def _shelf(self, setting: str, front: Front, policy: Policy) -> Shelf | None:
        if self.identity is None or policy.secret is None:
            return None
        vault = Vault(policy.secret, self.identity)
        line = self._line(front)
        return Shelf(setting, line, vault, clock=self._clock, boot=self.moment, tell=self.tell)

    def _line(self, front: Front) -> Line:
        assert self._connect is not None
        # Nothing is connected yet, so of two threads that come at once one line is simply not used.
        return self.lines.get(front.place) or self.lines.setdefault(front.place, self._connect(front, Breaker()))


def check_fronts(policies: Iterable[Policy], identity: bytes | None) -> None:
    """Find out at start-up, and not with the first request, that a shared front cannot be used."""
    fronts = [front for policy in policies for front in (policy.replay_cache, policy.lock_hint)]
    if not any(front is not None and front.shared for front in fronts):
        return
    if find_spec("redis") is None:
        raise ConfigurationError("redis is not installed: pip install 'oncekey[redis,encryption]'")
    _aead()
    if identity is None:
        raise ConfigurationError(NO_TABLES)
