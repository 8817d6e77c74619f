"""Stored values are read back unchanged: bytes, headers and keys; also the store's own clock, and `recall`."""

from __future__ import annotations

import time
import uuid
from itertools import product

from oncekey.core import model
from oncekey.core.policy import OnExpired, Policy
from oncekey.core.rulings import rule_finished
from oncekey.engine import request
from oncekey.ops.stats import Worker
from oncekey.testing.claims import FINGERPRINT, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey_contract.world import STATES, World, stand

BODIES = (
    b"",
    b"{}",
    b"\x00",
    b"a\x00b\x00",
    bytes(range(256)) * 3,
    "häßlich ☃ 🙂".encode(),
    b"\xff\xfe\xc3\x28",
    bytes(range(256)) * 8192,
    None,
)
HEADERS = (
    (),
    ((b"content-type", b"application/json"),),
    ((b"link", b"</a>; rel=a"), (b"x", b"1"), (b"link", b"</b>; rel=b"), (b"link", b"</a>; rel=a")),
    ((b"X-Case", b'quo"ted, \\ and \t tab'), (b"empty", b"")),
    ((b"latin", bytes(range(128, 256))),),
)
KEYS = (
    "8e03978e-40d5-43e8-bc93-6894a57f9324",
    "k" * 255,
    "ü" * 255,
    "☃🙂 snow",
    "e\u0301",
    "\u00e9",
    "with 'quotes' and \"more\"",
    "100% :now $1 %s %(x)s ? {x} \\ \\x00",
    "'; DROP TABLE oncekey_record; --",
    " leading and trailing ",
    "\t",
    "\x7f\x01",
    "\u200b",
    "Straße",
    "STRASSE",
)


class Keeping:
    """The store returns exactly the bytes that were stored."""

    def test_a_response_is_replayed_byte_for_byte(self, world: World) -> None:
        """Every byte value, an empty body, a tombstone, and two megabytes."""
        for body in BODIES:
            for headers in HEADERS:
                claim = a_claim()
                settlement = model.Completed(model.StoredResponse(200, headers, body), model.Outcome.SUCCESS)
                assert world.settle(world.owned(claim), settlement).ours
                verdict = world.begin(again(claim))
                assert isinstance(verdict, model.Replay)
                assert verdict.record.response == settlement.response

    def test_every_status_code_is_stored(self, world: World) -> None:
        """Every status code is read back unchanged."""
        for status in (200, 201, 204, 302, 400, 402, 404, 409, 422, 500, 599):
            claim = a_claim()
            world.settle(world.owned(claim), answered(status=status))
            response = world.record(claim.id).response
            assert response is not None
            assert response.status == status

    def test_keys_are_opaque(self, world: World) -> None:
        """Keys with different spellings are different keys, and no spelling causes an error."""
        for scope in ("", "a|b", "ü☃'\"%:x"):
            claims = [a_claim(key) for key in KEYS]
            claims = [again(claim, id=type(claim.id)(scope, claim.id.key)) for claim in claims]
            for claim in claims:
                assert world.owned(claim).fence == 1, claim.id
            for claim in claims:
                assert world.record(claim.id).incarnation == claim.incarnation

    def test_long_text_fields_are_stored(self, world: World) -> None:
        """Paths, operations, methods and errors of any sensible length are stored without an error."""
        claim = a_claim(path="/" + "päth/" * 800, operation="o" * 500, method="VERSION-CONTROL")
        lease = world.owned(claim)
        world.settle(lease, model.Doubtful("x" * 5000))
        record = world.record(claim.id)
        assert (record.path, record.operation, record.method) == (claim.path, claim.operation, claim.method)
        assert record.last_error == "x" * 5000

    def test_long_durations_do_not_overflow(self, world: World) -> None:
        """A hundred years in microseconds do not overflow."""
        century = 100 * 365 * TTL
        claim = a_claim(lease=century, deadline=2 * century, ttl=3 * century, call_timeout=century)
        lease = world.owned(claim)
        assert lease.lease_until == world.clock.now + century
        assert world.record(claim.id).expires_at == world.clock.now + 3 * century

    def test_the_store_uses_its_own_clock_without_a_test_clock(self, world: World) -> None:
        """One clock sets all timestamps of a record, and it never runs backwards."""
        claim = a_claim()
        begun = world.go(request.begin(world.unclocked, claim, Policy()))
        assert isinstance(begun, model.Proceed)
        record, lease = begun.record, begun.lease
        assert record is not None
        assert abs(record.created_at - time.time_ns() // 1000) < model.HOUR
        assert record.last_run_at == record.created_at
        assert lease.lease_until == record.created_at + claim.lease
        assert lease.deadline == record.created_at + claim.deadline
        assert lease.expires_at == record.created_at + claim.ttl

        renewed = world.go(request.renew(world.unclocked, lease, claim.lease))
        assert renewed is not None
        assert renewed >= lease.lease_until

        settled = world.go(request.settle(world.unclocked, model.Lease.of(record), answered()))
        assert settled.ours
        assert settled.snapshot.record is not None
        finished = settled.snapshot.record.finished_at
        assert finished is not None
        assert finished >= record.created_at
        assert settled.snapshot.record.expires_at == finished + claim.ttl
        assert world.go(world.unclocked.find(claim.id)).now >= finished

    def test_a_worker_is_listed_until_it_leaves(self, world: World) -> None:
        """Each heartbeat updates `seen_at` but not the start, and leaving deletes the row."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        name = f"host:7:{uuid.uuid4().hex}"

        def seen() -> Worker | None:
            roll = world.go(upkeep.workers())
            assert roll.now == world.clock()
            return next((one for one in roll.workers if one.name == name), None)

        assert seen() is None
        began = world.go(upkeep.beat(name, ("relay", "sweeper"), 15 * model.SECOND))
        assert seen() == Worker(name, ("relay", "sweeper"), began, began, 15 * model.SECOND)
        world.advance(14 * model.SECOND)
        world.lose_reply("beat")  # it is sent again, because a second beat is harmless
        assert world.go(upkeep.beat(name, ("relay",), 20 * model.SECOND)) == began + 14 * model.SECOND
        assert seen() == Worker(name, ("relay",), began, began + 14 * model.SECOND, 20 * model.SECOND)
        world.lose_reply("leave")
        world.go(upkeep.leave(name))
        world.go(upkeep.leave(name))
        assert seen() is None

    def test_a_dead_worker_is_removed_after_the_given_time(self, world: World) -> None:
        """Not earlier: an operator should see that it died."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        name = f"host:7:{uuid.uuid4().hex}"

        def is_listed() -> bool:
            return name in {one.name for one in world.go(upkeep.workers()).workers}

        world.go(upkeep.beat(name, (), model.SECOND))
        world.advance(model.HOUR)
        world.go(upkeep.forget_workers(model.HOUR))  # the worker announced its next beat for a second later
        assert is_listed()
        world.advance(model.SECOND)
        assert world.go(upkeep.forget_workers(model.HOUR)) >= 1
        assert not is_listed()


def _finished_of(record: model.Record) -> model.Finished:
    return model.Finished(
        id=record.id,
        incarnation=record.incarnation,
        operation=record.operation,
        effects=record.effects,
        fingerprint=record.fingerprint,
        response=record.response,
        expires_at=record.expires_at,
    )


class Recalling:
    """`recall` agrees with the whole record, and returns everything that a replay needs."""

    def test_only_a_completed_record_is_recalled(self, world: World) -> None:
        """For any other record `recall` returns nothing, and the request reads the whole record (P6)."""
        for state in STATES:
            standing = stand(world, state)
            glimpse = world.go(world.store.recall(standing.claim.id))
            if state is model.State.COMPLETED:
                assert glimpse == (_finished_of(world.record(standing.claim.id)), world.clock())
            else:
                assert glimpse is None, state
        assert world.go(world.store.recall(model.RecordId("shop|tenant-1", "nobody-used-this-one"))) is None

    def test_a_key_is_recalled_in_its_own_scope(self, world: World) -> None:
        """The same key of another tenant is another key."""
        standing = stand(world, model.State.COMPLETED)
        assert world.go(world.store.recall(model.RecordId("shop|tenant-2", standing.claim.id.key))) is None

    def test_a_response_is_recalled_byte_for_byte(self, world: World) -> None:
        """Headers in order, repeated headers, a binary body, and a body that was not stored."""
        headers = ((b"content-type", b"application/octet-stream"), (b"set-cookie", b"a=\xff"), (b"set-cookie", b"b"))
        for body in (bytes(range(256)), b"", None):
            claim, response = a_claim(), model.StoredResponse(402, headers, body)
            assert world.settle(world.owned(claim), model.Completed(response, model.Outcome.FAILURE)).ours
            glimpse = world.go(world.store.recall(claim.id))
            assert glimpse is not None
            assert glimpse.finished.response == response

    def test_recall_all_returns_the_same_as_recall_of_each_key(self, world: World) -> None:
        """In every state, with duplicates, with keys that do not exist, and with an empty list."""
        ids = [stand(world, state).claim.id for state in (*STATES, model.State.COMPLETED)]
        odd = a_claim('a "quoted" \\ key, with ü and 漢字')
        assert world.settle(world.owned(odd), answered()).ours
        ids += [odd.id, odd.id, model.RecordId("shop|tenant-2", odd.id.key)]
        each = {one: world.go(world.store.recall(one)) for one in ids}
        found = world.go(world.store.recall_all(tuple(ids)))
        assert found == {one: glimpse for one, glimpse in each.items() if glimpse is not None}
        assert len(found) == 3  # noqa: PLR2004  (two that were made to stand, and the odd one)
        assert world.go(world.store.recall_all(())) == {}

    def test_a_recalled_record_leads_to_the_same_verdict_as_a_claim(self, world: World) -> None:
        """The same request and another one, up to the last microsecond of the ttl and after it."""
        for age, fingerprint, policy in product(
            (0, TTL - 1, TTL), (FINGERPRINT, OTHER_FINGERPRINT), (Policy(), Policy(on_expired=OnExpired.GONE))
        ):
            standing = stand(world, model.State.COMPLETED)
            world.advance(age)
            glimpse = world.go(world.store.recall(standing.claim.id))
            assert glimpse is not None
            ruled = rule_finished(glimpse.finished, glimpse.now, fingerprint, policy)
            verdict = world.begin(again(standing.claim, fingerprint=fingerprint), policy)
            if isinstance(verdict, model.Replay):
                assert isinstance(verdict.record, model.Record)
                assert ruled == model.Replay(_finished_of(verdict.record), verdict.now)
            else:
                assert ruled == (verdict if isinstance(verdict, model.Refuse) else None)

    def test_an_expired_response_is_not_recalled_after_a_new_claim(self, world: World) -> None:
        """Neither while it is running, nor the earlier response once it has a new one (31)."""
        standing = stand(world, model.State.COMPLETED)
        world.advance(TTL)
        lease = world.owned(again(standing.claim))
        assert world.go(world.store.recall(lease.id)) is None
        assert world.settle(lease, answered(b"another answer")).ours
        assert world.go(world.store.recall(lease.id)) == (_finished_of(world.record(lease.id)), world.clock())

    def test_recall_returns_the_time_of_the_store_clock(self, world: World) -> None:
        """Without a test clock `recall` returns the store's clock, like every other read."""
        standing = stand(world, model.State.COMPLETED)
        glimpse = world.go(world.unclocked.recall(standing.claim.id))
        assert glimpse is not None
        before = world.go(world.unclocked.find(standing.claim.id)).now
        again_ = world.go(world.unclocked.recall(standing.claim.id))
        assert again_ is not None
        assert glimpse.now <= before <= again_.now
