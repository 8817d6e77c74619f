"""Fronts: caches before the store. The form of their copies, and how long a copy is valid.

A front is read before the store: it has responses of completed records (`replay_cache`), and keys that are in progress
(`lock_hint`). It is never authoritative. A copy is made from a reply of the store, and ends by the store's clock.
Without a copy the store is read.

`FrontEntry` and `Held` are those copies, with their form as bytes. This module does not seal, send or read a clock.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple
from uuid import UUID

from oncekey.core.model import (
    RESPONSE_SCHEMA,
    SECOND,
    Duration,
    Effects,
    Finished,
    Instant,
    Record,
    RecordId,
    StoredResponse,
)

FRESH: Final = 60.0
"""Seconds for which an estimate of the store's clock is valid after a reply of the store."""
DRIFT: Final = 0.0002
"""By how much two clocks may differ in their speed."""
FORMAT: Final = 1


class StoreClock:
    """The store's clock, estimated from its replies: not before `earliest`, and not after `latest`.

    The store reads its clock at some moment between a query and its reply, and may return whole seconds only. Each
    reply gives two bounds. The bounds from earlier replies move apart as clocks drift. The narrower bounds count. If
    they contradict each other, the store's clock was set, or after a fail-over it is another server's: then only the
    last reply counts. An estimate is valid for `FRESH` seconds after a reply.

    A copy ends by `latest`, and begins by `earliest`, so that it is never valid for longer than it should.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[float, Instant, Instant] | None = None
        """A moment of this process's own clock, and the earliest and latest instant of the store at that moment."""

    def adjust(self, low: Instant, high: Instant, asked: float, answered: float) -> None:
        """Take a reply of the store: its clock was between `low` and `high`; the query was sent at `asked`."""
        known, high = self._known, high + math.ceil((answered - asked) * (1 + DRIFT) * SECOND)
        if known is not None and answered < known[0]:
            return  # a reply to a later query was already used
        earliest, latest = self.earliest(answered), self.latest(answered)
        if earliest is not None and latest is not None and max(low, earliest) <= min(high, latest):
            low, high = max(low, earliest), min(high, latest)
        self._known = answered, low, high

    def earliest(self, moment: float) -> Instant | None:
        """The earliest instant that the store's clock may show at this moment of the process; None: unknown."""
        known = self._known
        if known is None or moment - known[0] > FRESH:
            return None
        since = moment - known[0]
        return known[1] + math.floor((since - DRIFT * abs(since)) * SECOND)

    def latest(self, moment: float) -> Instant | None:
        """The latest instant that the store's clock may show at this moment of the process; None: unknown."""
        known = self._known
        if known is None or moment - known[0] > FRESH:
            return None
        since = moment - known[0]
        return known[2] + math.ceil((since + DRIFT * abs(since)) * SECOND)


# Copies in a shared front


class FrontEntry(NamedTuple):
    """The response of a completed record, as the store returned it."""

    finished: Finished | Record
    read_at: Instant
    """The store's clock when it was read."""
    until: Instant
    """The instant of the store's clock until which the copy is valid: never after the record's own expiry."""


class Held(NamedTuple):
    """A key in progress, as the store granted its claim."""

    fingerprint: str
    begun: Instant
    lease_until: Instant | None
    """None: a lock that ends with its transaction, at an unknown time."""
    until: Instant


def entry_bytes(entry: FrontEntry) -> bytes:
    """The bytes of an entry, before they are sealed."""
    finished, response = entry.finished, entry.finished.response
    facts: dict[str, Any] = {
        "v": FORMAT,
        "i": finished.incarnation.hex,
        "o": finished.operation,
        "e": finished.effects.value,
        "f": finished.fingerprint,
        "x": finished.expires_at,
        "r": entry.read_at,
        "u": entry.until,
    }
    body = b""
    if response is not None:
        lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers]
        facts["a"] = [response.status, response.schema_version, lines, response.body is not None]
        body = response.body or b""
    return json.dumps(facts, separators=(",", ":")).encode() + b"\n" + body


def entry_of(plain: bytes, record_id: RecordId) -> FrontEntry | None:
    """The entry in these bytes; None if another version of oncekey wrote them."""
    head, _, body = plain.partition(b"\n")
    try:
        facts = json.loads(head)
        if facts["v"] != FORMAT:
            return None
        response = None
        if "a" in facts:
            status, schema, lines, kept = facts["a"]
            if schema != RESPONSE_SCHEMA:
                return None
            headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in lines)
            response = StoredResponse(status, headers, body if kept else None, schema)
        incarnation, effects = UUID(hex=facts["i"]), Effects(facts["e"])
        finished = Finished(record_id, incarnation, facts["o"], effects, facts["f"], response, facts["x"])
        return FrontEntry(finished, facts["r"], facts["u"])
    except (KeyError, TypeError, ValueError):
        return None


def held_bytes(held: Held) -> bytes:
    """The bytes of a held key, before they are sealed."""
    return json.dumps([FORMAT, *held], separators=(",", ":")).encode()


def held_of(plain: bytes) -> Held | None:
    """The held key in these bytes; None if another version of oncekey wrote them."""
    try:
        version, *facts = json.loads(plain)
        return Held(*facts) if version == FORMAT else None
    except (TypeError, ValueError):
        return None


# Commands for a shared front


class Command(NamedTuple):
    """One command for a Redis server: a read, a write with a lifetime, or a removal."""

    verb: bytes
    name: bytes
    value: bytes = b""
    life: Duration = 0

    @property
    def words(self) -> tuple[bytes | int, ...]:
        """The command as it is sent to the server."""
        if self.verb in {KEEP, REPLACE}:
            millis = max(1, self.life // 1000)
            return (b"SET", self.name, self.value, b"PX", millis, *((b"NX",) if self.verb == KEEP else ()))
        return (self.verb, self.name)


GET: Final = b"GET"
DROP: Final = b"DEL"
KEEP: Final = b"SET NX"
"""Write only if there is no copy: of two readers, or of a reader and an operator's bust, the first write stays."""
REPLACE: Final = b"SET"
