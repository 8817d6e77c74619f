"""Redis that fails over: what is still there, what is not, and that the store finds the new primary by itself."""

from __future__ import annotations

import pytest

from harness import flows
from harness.patience import wait_until
from harness.valkeys import SLOTS, Cluster, pair
from oncekey import wire
from oncekey.core.errors import StoreError
from oncekey.core.model import Proceed, Replay
from oncekey.core.policy import Policy
from oncekey.databases.redis.nodes import _SLOTS
from oncekey.databases.redis.talk import names_of
from oncekey.testing.claims import a_claim, again, answered

LARGE = bytes(range(256)) * 256  # more of these than sockets hold


def settled(engine, body=b"done"):
    """A claim whose settlement was acknowledged; None: it was not."""
    claim = a_claim()
    try:
        verdict = flows.begin(engine, claim, Policy())
        return claim if flows.settle(engine, verdict.lease, answered(body)).ours else None
    except StoreError:
        return None


def replayed(engine, claims):
    """Those that are answered as before; all others would be executed again."""
    return [claim for claim in claims if isinstance(flows.begin(engine, again(claim), Policy()), Replay)]


def answers(engine):
    """Whether the store takes a new key."""
    return settled(engine) is not None


def primary_of(claim):
    """Which third of the slots a key is in."""
    return _SLOTS[names_of(claim.id.scope, claim.id.key)[0]] * 3 // SLOTS


def test_cluster_continues_after_its_primary_is_killed():
    with Cluster() as cluster:
        engine = wire.connect(f"{cluster.url}?wait=1&wait_ms=5000")
        waiting = wire.connect(cluster.url)
        before = [settled(engine) for _ in range(30)]
        assert {primary_of(claim) for claim in before} == {0, 1, 2}
        begun = next(claim for claim in (a_claim() for _ in range(1000)) if primary_of(claim) == 0)
        lease = flows.begin(engine, begun, Policy()).lease

        cluster.nodes[0].kill()

        lost = next(claim for claim in (a_claim() for _ in range(1000)) if primary_of(claim) == 0)
        with pytest.raises(StoreError):
            flows.begin(waiting, lost, Policy())
        wait_until(lambda: cluster.nodes[3].info("role") == "master")
        wait_until(lambda: isinstance(_tried(waiting, lost), Proceed))
        # Who began before the fail-over ends after it, and every answer is still there.
        assert flows.settle(waiting, lease, answered()).ours
        assert replayed(waiting, [*before, begun]) == [*before, begun]
        waiting.close()
        engine.close()


def _tried(engine, claim):
    try:
        return flows.begin(engine, claim, Policy())
    except StoreError:
        return None


def test_sentinels_name_the_new_primary():
    with pair(sentinels=3) as watched:
        engine = wire.connect(f"{watched.url}?wait=1&wait_ms=5000")
        before = [settled(engine) for _ in range(5)]
        engine.close()
        assert None not in before
        knowing = wire.connect(watched.url)
        assert answers(knowing)

        watched.primary.kill()
        assert not answers(knowing)
        wait_until(watched.is_promoted)

        # Who knew the old primary finds the new one by itself, and so does who knew none.
        wait_until(lambda: answers(knowing))
        assert replayed(knowing, before) == before
        coming = wire.connect(watched.url)
        assert answers(coming)
        coming.close()
        knowing.close()


@pytest.mark.parametrize("wait", [0, 1])
def test_failover_loses_unreplicated_writes_unless_wait_is_set(wait):
    """What `docs/howto/redis.md` says can be lost, and that with WAIT nothing is that was acknowledged."""
    with pair() as both:
        engine = wire.connect(f"{both.primary.url}?wait={wait}&wait_ms=50")
        first = [settled(engine) for _ in range(5)]
        both.replica.freeze()
        tried = [settled(engine, LARGE) for _ in range(300 if not wait else 3)]
        acknowledged = [claim for claim in (*first, *tried) if claim is not None]
        both.primary.kill()
        both.replica.thaw()
        both.replica.say("REPLICAOF", "NO", "ONE")
        engine.close()

        after = wire.connect(both.replica.url)
        kept = replayed(after, acknowledged)
        after.close()

    assert None not in first
    if wait:
        assert acknowledged == first  # what nobody confirmed was not acknowledged either
        assert kept == acknowledged
    else:
        assert len(acknowledged) == 305
        assert 5 <= len(kept) < 305
