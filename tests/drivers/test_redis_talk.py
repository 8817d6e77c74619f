"""The flows of Redis with replies that a server seldom gives: moved slots, lost scripts, primaries that are none."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from oncekey.cells import Seen
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.databases.redis.address import parse
from oncekey.databases.redis.talk import RedisTalks

FIRST, SECOND = ("a", 7000), ("b", 7001)
SLOTS = [[0, 16383, [b"a", 7000, b"id"]]]
ABSENT = [[b"1", b"2", []]]
SEEN = Seen("i", 1)
RECORD = ("s", "k")


def said(flow, *replies):
    """What a flow says, given these replies one after the other; and what it returns."""
    sayings, answers = [next(flow)], list(replies)
    try:
        while True:
            answer = answers.pop(0)
            sayings.append(flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer))
    except StopIteration as stop:
        assert answers == []
        return [(one.node, one.commands[0][0], one.writes) for one in sayings], stop.value


@pytest.fixture
def talks():
    return RedisTalks(parse("redis+cluster://a:7000"))


def test_a_slot_that_has_moved_is_followed_and_remembered(talks):
    moved = MovedError("5 b:7001")
    flow, swapped = said(talks.swap(*RECORD, SEEN, None, None), [SLOTS], [moved], [1])
    assert flow == [(FIRST, "CLUSTER", False), (FIRST, "EVALSHA", True), (SECOND, "EVALSHA", True)]
    assert swapped is True
    assert said(talks.swap(*RECORD, SEEN, None, None), [0]) == ([(SECOND, "EVALSHA", True)], False)


def test_migrating_slot_redirects_one_command(talks):
    flow, swapped = said(talks.swap(*RECORD, SEEN, None, None), [SLOTS], [AskError("5 b:7001")], [b"OK", 1])
    assert flow[-1] == (SECOND, "ASKING", True)
    assert swapped is True
    assert said(talks.look(*RECORD), ABSENT)[0] == [(FIRST, "EVALSHA", False)]


def test_missing_script_is_sent_in_full(talks):
    flow, (line, now) = said(talks.look(*RECORD), [SLOTS], [NoScriptError("NOSCRIPT")], ABSENT)
    assert [one[1] for one in flow] == ["CLUSTER", "EVALSHA", "EVAL"]
    assert (line, now) == (None, 1_000_002)


def test_sentinels_are_queried_again_after_a_demotion():
    talks = RedisTalks(parse("redis+sentinel://w:1,x:2/shop/0"))
    flow, swapped = said(
        talks.swap(*RECORD, SEEN, None, None),
        StoreUnavailableError("the first sentinel is gone"),
        [[b"a", b"7000"]],
        [ReadOnlyError("READONLY")],
        [[b"b", b"7001"]],
        [1],
    )
    assert [one[0] for one in flow] == [("w", 1), ("x", 2), FIRST, ("w", 1), SECOND]
    assert swapped is True


def test_write_with_lost_reply_is_not_repeated(talks):
    with pytest.raises(CommitAmbiguousError):
        said(talks.swap(*RECORD, SEEN, None, None), [SLOTS], CommitAmbiguousError("lost"))
    assert talks.nodes.known == {}  # where it lies now is asked for before the next one


@pytest.mark.parametrize(
    "refusal", [ClusterDownError("CLUSTERDOWN"), OutOfMemoryError("OOM"), TryAgainError("TRYAGAIN")]
)
def test_rejected_write_is_not_ambiguous(talks, refusal):
    with pytest.raises(StoreUnavailableError, match="Redis refused") as raised:
        said(talks.swap(*RECORD, SEEN, None, None), [SLOTS], [refusal])
    assert not isinstance(raised.value, CommitAmbiguousError)


def test_endless_redirects_raise_store_unavailable(talks):
    around = [[MovedError(f"5 {'ab'[number % 2]}:7000")] for number in range(8)]
    with pytest.raises(StoreUnavailableError, match="from node to node"):
        said(talks.swap(*RECORD, SEEN, None, None), [SLOTS], *around)


def test_rejected_wait_command_leaves_the_write_ambiguous():
    talks = RedisTalks(parse("redis://a:7000?wait=1"))
    with pytest.raises(CommitAmbiguousError, match="0 of 1 replicas"):
        said(talks.swap(*RECORD, SEEN, None, None), [1, ResponseError("no")])
    # Whoever looks next wants it confirmed, as this process was not sure of it.
    with pytest.raises(StoreUnavailableError, match="too few replicas"):
        said(talks.look(*RECORD), ABSENT, [b"OK", 0])
    assert said(talks.look(*RECORD), ABSENT, [b"OK", 1])[1][0] is None
    assert said(talks.look(*RECORD), ABSENT)[1][0] is None


def test_read_from_a_former_primary_is_repeated():
    talks = RedisTalks(parse("redis+sentinel://w:1/shop/0?wait=1"))
    done = [[b"1", b"2", [b"state", b"scompleted"]]]
    flow, (line, _) = said(
        talks.look(*RECORD),
        [[b"a", b"7000"]],
        done,
        [ReadOnlyError("READONLY"), 0],
        [[b"b", b"7001"]],
        [b"OK", 1],
        ABSENT,
    )
    assert [one[:2] for one in flow][-2:] == [(SECOND, "SET"), (SECOND, "EVALSHA")]
    assert line is None
