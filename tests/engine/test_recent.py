"""Answers and settled keys in memory: bounded, never wrong for longer than said, and never a reason to execute (A2)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from frameworks.shop import Shop
from harness.ledger import down
from oncekey.core.model import INLINE, LOCAL, SECOND, Code, Record, RecordId, Refuse, Replay, State
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.core.policy import Policy
from oncekey.engine.local import record_as_claimed
from oncekey.engine.operation import Operation
from oncekey.engine.recent import OVERHEAD, Answers
from oncekey.engine.run import SettledKeys
from oncekey.testing.claims import OTHER_FINGERPRINT, a_claim, again, answered

CACHED = Policy(replay_cache=timedelta(seconds=30))
NOW = 1_700_000_000 * SECOND


class Boot:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finished(claim: Any, body: bytes = b"{}", **changes: Any) -> Record:
    """The record of a claim that was answered."""
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


def keep(answers: Answers, replay: Replay) -> None:
    """Nothing in memory is waited for."""
    assert CACHED.replay_cache is not None
    assert list(answers.keep(replay, CACHED.replay_cache.span)) == []


def find(answers: Answers, asked: Any, policy: Policy) -> Replay | Refuse | None:
    flow = answers.find(asked, policy)
    with pytest.raises(StopIteration) as said:
        next(flow)
    return said.value.value  # type: ignore[no-any-return]


@pytest.fixture
def boot() -> Boot:
    return Boot()


def test_cached_response_is_replayed_and_mismatch_rejected(boot: Boot) -> None:
    answers, claim = Answers(boot), a_claim()
    keep(answers, Replay(finished(claim), NOW))
    assert isinstance(find(answers, again(claim), CACHED), Replay)
    assert find(answers, again(claim, fingerprint=OTHER_FINGERPRINT), CACHED) == Refuse(Code.KEY_REUSED)
    assert find(answers, a_claim(), CACHED) is None


def test_cached_response_expires_after_the_configured_time(boot: Boot) -> None:
    answers, claim = Answers(boot), a_claim()
    keep(answers, Replay(finished(claim), NOW))
    boot.now += 29.9
    assert find(answers, claim, CACHED) is not None
    boot.now += 0.2
    assert find(answers, claim, CACHED) is None
    assert len(answers) == 0


def test_cached_response_expires_with_its_record(boot: Boot) -> None:
    answers, claim = Answers(boot), a_claim()
    keep(answers, Replay(finished(claim, expires_at=NOW + 2 * SECOND), NOW))
    boot.now += 1.9
    assert find(answers, claim, CACHED) is not None
    boot.now += 0.2
    assert find(answers, claim, CACHED) is None


def test_oldest_cached_responses_are_evicted(boot: Boot) -> None:
    answers = Answers(boot, most_bytes=3 * (OVERHEAD + 10))
    claims = [a_claim() for _ in range(5)]
    for claim in claims:
        keep(answers, Replay(finished(claim, b"x" * 10), NOW))
    assert [find(answers, claim, CACHED) is not None for claim in claims] == [False, False, True, True, True]
    keep(answers, Replay(finished(a_claim(), b"x" * 10_000), NOW))
    assert len(answers) == 3


def test_hints_are_bounded() -> None:
    settled_keys = SettledKeys(most=2)
    ids = [RecordId("shop", str(number)) for number in range(3)]
    for one in (*ids, ids[2]):
        settled_keys.add(one)
    assert list(settled_keys.known) == ids[1:]


def orders(effects: Any, **policy: Any) -> Shop:
    """A shop that counts its runs."""
    shop = Shop(policy=Policy(**policy))

    @shop.post(effects=effects, status_code=201)
    async def create(op: Operation) -> dict[str, int]:
        shop.runs.append(1)
        return {"runs": len(shop.runs)}

    return shop


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_cached_response_is_returned_without_the_store(effects: Any) -> None:
    shop = orders(effects, replay_cache=timedelta(seconds=30))
    first, read = await shop.send("/orders"), await shop.send("/orders")
    for fault in ("recall", "find", "claim", "lock", "begin"):
        shop.ledger.faults[fault].extend([down] * 3)
    cached = await shop.send("/orders")
    assert [reply.status for reply in (first, read, cached)] == [201, 201, 201]
    assert (read.body, cached.body) == (first.body, first.body)
    assert (cached.replayed, shop.runs) == (True, [1])


async def test_first_response_is_not_cached() -> None:
    # What is kept was read from a committed record: nothing is promised that a crash could take back.
    shop = orders(INLINE, replay_cache=timedelta(seconds=30))
    await shop.send("/orders")
    shop.ledger.faults["recall"].append(down)
    shop.ledger.faults["claim"].append(down)
    assert (await shop.send("/orders")).status == 503


async def test_another_request_under_a_cached_key_is_refused() -> None:
    shop = orders(INLINE, replay_cache=timedelta(seconds=30))
    for _ in range(2):
        await shop.send("/orders", {"amount": 1})
    assert (await shop.send("/orders", {"amount": 2})).status == 422
