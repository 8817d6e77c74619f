"""What is stored comes back as it was: bytes, headers, keys, and the store's own clock."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from oncekey.core.model import (
    HOUR,
    SECOND,
    Completed,
    Doubtful,
    Lease,
    Outcome,
    Proceed,
    Replay,
    StoredResponse,
)
from oncekey.core.policy import Policy
from oncekey.engine import request
from oncekey.ops.stats import Worker
from oncekey.testing.claims import TTL, a_claim, again, answered

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World

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

    def test_answers_come_back_byte_for_byte(self, world: World) -> None:
        """Every byte, no byte, a tombstone, and two megabytes."""
        for body in BODIES:
            for headers in HEADERS:
                claim = a_claim()
                settlement = Completed(StoredResponse(200, headers, body), Outcome.SUCCESS)
                assert world.settle(world.owned(claim), settlement).ours
                verdict = world.begin(again(claim))
                assert isinstance(verdict, Replay)
                assert verdict.record.response == settlement.response

    def test_every_status_is_kept(self, world: World) -> None:
        """A number is a number."""
        for status in (200, 201, 204, 302, 400, 402, 404, 409, 422, 500, 599):
            claim = a_claim()
            world.settle(world.owned(claim), answered(status=status))
            response = world.record(claim.id).response
            assert response is not None
            assert response.status == status

    def test_keys_are_opaque(self, world: World) -> None:
        """No two spellings are one key, and no spelling breaks anything."""
        for scope in ("", "a|b", "ü☃'\"%:x"):
            claims = [a_claim(key) for key in KEYS]
            claims = [again(claim, id=type(claim.id)(scope, claim.id.key)) for claim in claims]
            for claim in claims:
                assert world.owned(claim).fence == 1, claim.id
            for claim in claims:
                assert world.record(claim.id).incarnation == claim.incarnation

    def test_long_names_fit(self, world: World) -> None:
        """Paths, operations, methods and errors of any sensible length, without an error."""
        claim = a_claim(path="/" + "päth/" * 800, operation="o" * 500, method="VERSION-CONTROL")
        lease = world.owned(claim)
        world.settle(lease, Doubtful("x" * 5000))
        record = world.record(claim.id)
        assert (record.path, record.operation, record.method) == (claim.path, claim.operation, claim.method)
        assert record.last_error == "x" * 5000

    def test_long_spans_fit(self, world: World) -> None:
        """A hundred years in microseconds are no overflow."""
        century = 100 * 365 * TTL
        claim = a_claim(lease=century, deadline=2 * century, ttl=3 * century, call_timeout=century)
        lease = world.owned(claim)
        assert lease.lease_until == world.clock.now + century
        assert world.record(claim.id).expires_at == world.clock.now + 3 * century

    def test_without_a_clock_the_store_uses_its_own(self, world: World) -> None:
        """And it is one clock for all of a record's instants, which never runs backwards."""
        claim = a_claim()
        begun = world.go(request.begin(world.unclocked, claim, Policy()))
        assert isinstance(begun, Proceed)
        record, lease = begun.record, begun.lease
        assert record is not None
        assert abs(record.created_at - time.time_ns() // 1000) < HOUR
        assert record.last_run_at == record.created_at
        assert lease.lease_until == record.created_at + claim.lease
        assert lease.deadline == record.created_at + claim.deadline
        assert lease.expires_at == record.created_at + claim.ttl

        renewed = world.go(request.renew(world.unclocked, lease, claim.lease))
        assert renewed is not None
        assert renewed >= lease.lease_until

        settled = world.go(request.settle(world.unclocked, Lease.of(record), answered()))
        assert settled.ours
        assert settled.snapshot.record is not None
        finished = settled.snapshot.record.finished_at
        assert finished is not None
        assert finished >= record.created_at
        assert settled.snapshot.record.expires_at == finished + claim.ttl
        assert world.go(world.unclocked.find(claim.id)).now >= finished

    def test_a_worker_is_on_the_roll_until_it_leaves(self, world: World) -> None:
        """Each beat moves the time at which it was seen; its start stays, and its leaving deletes the row."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        name = f"host:7:{uuid.uuid4().hex}"

        def seen() -> Worker | None:
            roll = world.go(upkeep.workers())
            assert roll.now == world.clock()
            return next((one for one in roll.workers if one.name == name), None)

        assert seen() is None
        began = world.go(upkeep.beat(name, ("relay", "sweeper"), 15 * SECOND))
        assert seen() == Worker(name, ("relay", "sweeper"), began, began, 15 * SECOND)
        world.advance(14 * SECOND)
        world.lose_reply("beat")  # it is sent again, because a second beat is harmless
        assert world.go(upkeep.beat(name, ("relay",), 20 * SECOND)) == began + 14 * SECOND
        assert seen() == Worker(name, ("relay",), began, began + 14 * SECOND, 20 * SECOND)
        world.lose_reply("leave")
        world.go(upkeep.leave(name))
        world.go(upkeep.leave(name))
        assert seen() is None

    def test_a_worker_that_died_is_forgotten_after_a_time(self, world: World) -> None:
        """Not before: an operator should see that it died."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        name = f"host:7:{uuid.uuid4().hex}"

        def is_there() -> bool:
            return name in {one.name for one in world.go(upkeep.workers()).workers}

        world.go(upkeep.beat(name, (), SECOND))
        world.advance(HOUR)
        world.go(upkeep.forget_workers(HOUR))  # the worker announced its next beat for a second later
        assert is_there()
        world.advance(SECOND)
        assert world.go(upkeep.forget_workers(HOUR)) >= 1
        assert not is_there()
