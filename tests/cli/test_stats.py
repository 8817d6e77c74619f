"""`oncekey stats`, on SQLite and PostgreSQL; and `oncekey reap --once`."""

from __future__ import annotations

import json
import uuid

from cli.operating import SCOPE, oncekey
from cli.test_dlq import deferred, emitted
from oncekey.core.model import HOUR, Doubtful, Effects, RecordId, Recovery
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered


def fill(shop):
    """Two answers, one of which has expired, one in doubt, one left behind, and two dead letters."""

    def own(**changes):
        return shop.begin(a_claim(id=RecordId(SCOPE, uuid.uuid4().hex), **changes), Policy()).lease

    shop.settle(own(operation="pay"), answered())
    shop.settle(own(operation="pay", ttl=-HOUR), answered())
    shop.settle(own(effects=Effects.INLINE, recovery=Recovery.UNKNOWN, operation="notify"), Doubtful("time_out"))
    own(lease=-HOUR, operation="order")
    deferred(shop)
    emitted(shop)


def test_counts(shop, url):
    fill(shop)
    said = json.loads(oncekey("stats", "--store", url, "--json").stdout)
    assert said["keys"] == 5
    assert said["by_state"] == {"completed": 2, "in_progress": 1, "unknown": 2}
    assert said["by_effects"] == {"local": 3, "inline": 1, "outbox": 1}
    assert said["by_operation"]["pay"] == {"completed": 2}
    (left,) = [group for group in said["items"] if group["operation"] == "order"]
    assert (left["keys"], left["stale"], left["expired"]) == (1, 1, 0)
    assert {what: line["count"] for what, line in said["waiting"].items()} == {
        "unknown": 2, "stale": 1, "resumable": 0, "expired": 1, "parcels_due": 0, "dead_letters": 2,
    }  # fmt: skip
    assert said["waiting"]["stale"]["age_seconds"] >= 3600
    assert (said["outbox"]["depth"], said["dead_letters"]["count"]) == (0, 2)
    assert {line["topic"] for line in said["dead_letters"]["by_topic"]} == {"charge", "receipts"}
    assert said["duplicates"] is None
    assert "cannot be counted" in said["duplicates_note"]


def test_for_people(shop, url):
    empty = oncekey("stats", "--store", url).stdout
    assert empty.startswith("there are no keys\n")
    fill(shop)
    text = oncekey("stats", "--store", url).stdout
    assert "cannot be counted" in text
    assert any(line.split()[:4] == ["completed", "local", "pay", "2"] for line in text.splitlines())


def test_one_round_of_the_reaper(shop, url):
    fill(shop)
    said = json.loads(oncekey("reap", "--once", "--store", url, "--json").stdout)
    assert said == {"moved": 1, "by": {"purged": 1, "marked": 0, "parked": 0, "abandoned": 0, "notes": 0, "workers": 0}}
    assert "0 moved" in oncekey("reap", "--once", "--store", url).stdout
