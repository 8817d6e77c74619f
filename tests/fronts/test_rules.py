"""What lies in a shared memory: names, seals, copies, the clock that ends them, and the same rules as the store has."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.checks import LONGEST
from oncekey.core.errors import ConfigurationError
from oncekey.core.fronts import (
    FRESH,
    Command,
    FrontEntry,
    Held,
    StoreClock,
    entry_bytes,
    entry_of,
    held_bytes,
    held_of,
)
from oncekey.core.migrations import Applied, MigrationPhase
from oncekey.core.model import SECOND, Finished, Record, RecordId, Refuse, Replay, Snapshot, State, StoredResponse
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.core.policy import OnExpired, Policy, micros
from oncekey.core.rulings import rule, rule_finished, rule_held
from oncekey.engine.actions import Consult
from oncekey.engine.fronts import GONE, CacheCipher, SharedAnswers, SharedCache, check_fronts
from oncekey.engine.local import BUSY, record_as_claimed
from oncekey.engine.migrating import identity_of
from oncekey.testing.claims import OTHER_FINGERPRINT, a_claim, again, answered

SECRET = b"a secret of the shop's"
NOW = 1_800_000_000 * SECOND
HERE = b"this installation"
SHARED = Policy(secret=SECRET).override(replay_cache="redis://cache")


class Box:
    """A memory that does as it is told, and that a test may open."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.lives: dict[bytes, int] = {}

    def run(self, flow: Any) -> Any:
        try:
            action = next(flow)
            while True:
                assert isinstance(action, Consult)
                action = flow.send([self._do(command) for command in action.commands])
        except StopIteration as stop:
            return stop.value

    def _do(self, command: Command) -> bytes | None:
        if command.verb == b"GET":
            return self.values.get(command.name)
        if command.verb == b"DEL":
            self.values.pop(command.name, None)
        elif command.verb == b"SET" or command.name not in self.values:
            self.values[command.name], self.lives[command.name] = command.value, command.life
        return None


class Clocked:
    """Answers whose reader's clock is in the test's hands."""

    def __init__(self, vault: CacheCipher | None = None) -> None:
        self.moment = 100.0
        self.clock = StoreClock()
        self.clock.adjust(NOW, NOW, 100.0, 100.0)
        self.box = Box()
        self.vault = vault or CacheCipher(SECRET, HERE)
        shelf = SharedCache("replay_cache", None, self.vault, clock=self.clock, boot=lambda: self.moment)  # type: ignore[arg-type]
        self.answers = SharedAnswers(shelf)

    def told(self) -> None:
        """The store says what time it is."""
        now = NOW + round((self.moment - 100) * SECOND)
        self.clock.adjust(now, now, self.moment, self.moment)

    def keep(self, record: Record, life: int = 60 * SECOND, now: int = NOW) -> None:
        self.box.run(self.answers.keep(Replay(record, now), life))

    def find(self, asked: Any, policy: Policy = SHARED) -> Replay | Refuse | None:
        found: Replay | Refuse | None = self.box.run(self.answers.find(asked, policy))
        return found


def completed(claim: Any, body: bytes | None = b"{}", **changes: Any) -> Record:
    done = answered(body)
    record = replace(
        record_as_claimed(claim, WriteTarget(WriteKind.NEW, None), NOW),
        state=State.COMPLETED,
        outcome=done.outcome,
        response=done.response,
        owner=None,
        lease_until=None,
        finished_at=NOW,
    )
    return replace(record, **changes)


def finished(record: Record, **changes: Any) -> Finished:
    known = {name: getattr(record, name) for name in Finished.__slots__}
    return Finished(**{**known, **changes})


# Names and seals


# R20, R23, R179: nobody's name is another's, whatever the parts look like
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=2, max_size=6, unique=True))
def test_names_are_never_shared(ids: list[tuple[str, str]]) -> None:
    vault = CacheCipher(SECRET, HERE)
    names = {vault.name(kind, RecordId(*one)) for one in ids for kind in "ah"}
    assert len(names) == 2 * len(ids)


def test_cache_name_hides_the_key_and_depends_on_the_secret() -> None:
    one = RecordId("4:acme5:alice", "tenant:key-of-a-client")
    vaults = [
        CacheCipher(secret, place) for secret, place in product((SECRET, b"another secret of it"), (HERE, b"there"))
    ]
    names = {vault.name("a", one) for vault in vaults}
    assert len(names) == 4
    assert not any(word in name for name in names for word in (b"acme", b"alice", b"client"))
    assert all(len(name) == len(b"oncekey:a:") + 48 for name in names)


# R176: garbage, a cut, another key's value, another installation's, another secret's
def test_value_sealed_for_another_name_is_rejected() -> None:
    vault, name = CacheCipher(SECRET, HERE), b"oncekey:a:1"
    sealed = vault.seal(name, b"the answer")
    assert vault.unseal(name, sealed) == b"the answer"
    assert b"answer" not in sealed
    assert sealed != vault.seal(name, b"the answer")
    wrong = [b"", b"x", GONE, os.urandom(200), sealed[:-1], sealed + b"x", sealed[12:], bytes(12) + sealed[12:]]
    wrong += [sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :] for place in range(len(sealed))]
    assert [one for one in wrong if vault.unseal(name, one) is not None] == []
    assert vault.unseal(b"oncekey:a:2", sealed) is None
    assert CacheCipher(b"another secret of it", HERE).unseal(name, sealed) is None


def test_installation_identity_uses_its_first_migrations() -> None:
    lines = [Applied(number, MigrationPhase.PRE, "x", "y", applied_at=1000 * number) for number in range(1, 6)]
    mine = identity_of(lines)
    assert mine == identity_of(lines[:3])
    assert mine != identity_of([replace(lines[0], applied_at=1001), *lines[1:]])
    assert identity_of([]) is None


def test_a_front_that_cannot_be_used_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fronts([Policy(), Policy().override(replay_cache="memory")], None)
    check_fronts([SHARED], HERE)
    with pytest.raises(ConfigurationError, match="no tables"):
        check_fronts([SHARED], None)
    monkeypatch.setattr("oncekey.engine.fronts.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"oncekey\[redis,encryption\]"):
        check_fronts([SHARED], HERE)


# Copies

RESPONSES = [
    None,
    StoredResponse(201, ((b"content-type", b"application/json"), (b"x-odd", b"\xff\x00\n")), b"\n\x00\xff{}"),
    StoredResponse(204, (), b""),
    StoredResponse(200, ((b"location", b"/orders/7"),), None),
]


# R89: byte for byte
@pytest.mark.parametrize("response", RESPONSES)
def test_cache_entry_round_trips(response: StoredResponse | None) -> None:
    claim = a_claim()
    entry = FrontEntry(finished(completed(claim), response=response), NOW, NOW + 1)
    assert entry_of(entry_bytes(entry), claim.id) == entry


def test_entry_of_another_version_is_ignored() -> None:
    claim = a_claim()
    entry = entry_bytes(FrontEntry(finished(completed(claim)), NOW, NOW + 1))
    assert entry_of(entry.replace(b'"v":1', b'"v":2', 1), claim.id) is None
    newer = replace(answered().response, schema_version=2)
    assert entry_of(entry_bytes(FrontEntry(finished(completed(claim), response=newer), NOW, NOW + 1)), claim.id) is None
    held = Held("f", 1, None, 2)
    assert held_of(held_bytes(held)) == held
    assert held_of(held_bytes(held).replace(b"[1,", b"[2,", 1)) is None
    # One that says it is this version, and is not
    assert [entry_of(one, claim.id) for one in (b"", b"[]", b'{"v":1}', entry.replace(b'"local"', b'"later"'))] == [
        None
    ] * 4
    assert [held_of(one) for one in (b"", b"7", b"[1,2]")] == [None] * 3


# The store's clock


def test_store_clock_is_estimated_between_two_bounds() -> None:
    clock = StoreClock()
    assert (clock.earliest(10.0), clock.latest(10.0)) == (None, None)
    clock.adjust(NOW, NOW, 10.0, 10.5)  # said somewhere between 10.0 and 10.5
    assert (clock.earliest(10.5), clock.latest(10.5)) == (NOW, NOW + SECOND // 2 + 100)
    clock.adjust(NOW - 9 * SECOND, NOW - 9 * SECOND, 9.0, 9.1)  # an older question, whose answer was late
    assert clock.earliest(10.5) == NOW
    # To the second only: the narrower bounds count
    clock.adjust(NOW, NOW + SECOND, 10.5, 10.5)
    assert (clock.earliest(10.5), clock.latest(10.5)) == (NOW, NOW + SECOND // 2 + 100)
    # Another clock, after a fail-over
    clock.adjust(NOW - 60 * SECOND, NOW - 60 * SECOND, 11.0, 11.0)
    assert (clock.earliest(11.0), clock.latest(11.0)) == (NOW - 60 * SECOND, NOW - 60 * SECOND)
    assert clock.latest(11.0 + FRESH) is not None
    assert (clock.earliest(11.1 + FRESH), clock.latest(11.1 + FRESH)) == (None, None)


@given(
    st.lists(st.tuples(st.floats(0.001, 20), st.floats(0, 2), st.floats(0, 1), st.booleans()), min_size=1, max_size=20),
    st.floats(-0.0001, 0.0001),
)
def test_store_clock_bounds_contain_the_true_time(
    hearings: list[tuple[float, float, float, bool]], drift: float
) -> None:
    # However clocks drift, long an answer takes, and wherever in that time the store looked at its clock
    def there(moment: float) -> float:
        return NOW + moment * (1 + drift) * SECOND

    clock, moment = StoreClock(), 0.0
    for pause, took, looked, coarse in hearings:
        asked, moment = moment + pause, moment + pause + took
        said = int(there(asked + took * looked))
        low = said // SECOND * SECOND if coarse else said
        clock.adjust(low, low + SECOND if coarse else said + 1, asked, moment)
        for later in (moment, moment + 30):
            earliest, latest = clock.earliest(later), clock.latest(later)
            assert earliest is not None
            assert latest is not None
            assert earliest - 2 <= there(later) <= latest + 2  # microseconds lost to rounding


# The same rules, with time as a parameter

SITUATIONS = list(product((False, True), (False, True), OnExpired))


@pytest.mark.parametrize(("expired", "other", "on_expired"), SITUATIONS)
def test_cache_entry_and_record_give_the_same_ruling(expired: bool, other: bool, on_expired: OnExpired) -> None:
    # R38, R180: while it is believed; past the record's own end it says nothing at all
    here, claim = Clocked(), a_claim()
    record = completed(claim, expires_at=NOW + 10 * SECOND)
    here.keep(record)
    here.moment += 11 if expired else 9
    here.told()
    asked = again(claim, fingerprint=OTHER_FINGERPRINT) if other else again(claim)
    policy = SHARED.override(on_expired=on_expired)
    said = here.find(asked, policy)
    now = NOW + int((here.moment - 100) * SECOND)
    ruled = rule_finished(finished(record), now, asked.fingerprint, policy)
    assert said == (None if expired else ruled)
    if not expired:
        whole = rule(Snapshot(record, now), asked, policy)
        assert type(whole) is type(said)


# R180: never longer than its life, nor than the record's, by the store's clock
@pytest.mark.parametrize(("life", "expires", "ends"), [(60, 3600, 60), (60, 5, 5)])
def test_cache_entry_expires_with_its_record_or_lifetime(life: int, expires: int, ends: int) -> None:
    here, claim = Clocked(), a_claim()
    here.keep(completed(claim, expires_at=NOW + expires * SECOND), life * SECOND)
    assert set(here.box.lives.values()) == {ends * SECOND}
    for seconds, believed in ((ends - 0.001, True), (ends, False)):
        here.moment = 100 + seconds
        here.told()
        assert (here.find(claim) is not None) == believed


def test_expired_record_is_not_cached() -> None:
    here, claim = Clocked(), a_claim()
    here.keep(completed(claim, expires_at=NOW))
    assert here.box.values == {}


def test_cache_is_ignored_without_a_recent_store_clock() -> None:
    here, claim = Clocked(), a_claim()
    here.keep(completed(claim), 3600 * SECOND)
    here.moment += FRESH + 1
    assert here.find(claim) is None
    here.told()
    assert isinstance(here.find(claim), Replay)


def test_restored_cache_entry_is_valid_only_for_its_lifetime() -> None:
    # R176: whatever it kept aside, it cannot prolong
    here, claim = Clocked(), a_claim()
    here.keep(completed(claim), 30 * SECOND)
    ((name, old),) = here.box.values.items()
    assert here.box.run(here.answers.forget(claim.id)) is True
    assert here.find(claim) is None
    here.box.values[name] = old
    assert isinstance(here.find(claim), Replay)  # within its life: that much is documented
    here.moment += 30
    assert here.find(claim) is None


def test_response_read_before_a_bust_is_not_cached_after_it() -> None:
    here, claim = Clocked(), a_claim()
    record = completed(claim)
    assert here.box.run(here.answers.forget(claim.id)) is True
    here.keep(record)
    assert here.find(claim) is None
    assert set(here.box.values.values()) == {GONE}
    assert set(here.box.lives.values()) == {micros(LONGEST)}


def test_entries_of_others_are_refused() -> None:
    mine, claim, stranger = Clocked(), a_claim(), a_claim()
    mine.keep(completed(claim, b"mine"))
    mine.keep(completed(stranger, b"a stranger's"))
    first, second = mine.box.values
    mine.box.values[first], mine.box.values[second] = mine.box.values[second], mine.box.values[first]
    assert (mine.find(claim), mine.find(stranger)) == (None, None)


# R79, R80: what a duplicate hears of a key in somebody's hands is what the record would tell it
@pytest.mark.parametrize("after", [0, 1, 40, 299])
def test_lock_hint_and_record_give_the_same_ruling(after: int) -> None:
    claim = a_claim()
    record, now = record_as_claimed(claim, WriteTarget(WriteKind.NEW, None), NOW), NOW + after * SECOND
    held = Held(record.fingerprint, NOW, record.lease_until, now + 1)
    ruled = rule(Snapshot(record, now), again(claim), Policy())
    assert isinstance(ruled, Refuse)
    assert rule_held(held, now, claim.fingerprint) == replace(ruled, record=None)
    locked = Held(record.fingerprint, NOW, None, now + 1)
    assert rule_held(locked, now, claim.fingerprint) == BUSY
    assert rule_held(held, now, OTHER_FINGERPRINT) is None  # another request: the store says
