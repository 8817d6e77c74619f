"""What may stand in front of the store: where it is, for how long it is believed, and what is kept there.

A front is a memory that answers before the store is asked: finished answers (`replay_cache`), and keys that are being
worked on (`lock_hint`). It is never authoritative. What it says is a copy of what the store has said, with an end by
the store's clock, and what it does not say is asked of the store.

`Entry` and `Held` are those copies, and how they are written as bytes. Nothing here seals, sends or reads a clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
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

MEMORY: Final = "memory"
SHARED: Final = ("redis", "rediss", "unix")
LONGEST: Final = timedelta(hours=1)
"""The longest life of a copy: for so long a busted answer is kept from being filled in again."""
TIMEOUT: Final = timedelta(milliseconds=50)
FRESH: Final = 60.0
"""Seconds for which the store's clock is known without hearing it again."""
DRIFT: Final = 0.0002
"""By how much two clocks may differ in their speed."""
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Front:
    """A memory in front of the store: `Front("redis://cache:6379/0", life=30)`, or `Front("memory")`.

    `life` is how long a copy is believed at most, by the store's clock: for so long an answer may be given after an
    operator took it away, where the memory did not hear of that. `timeout` is how long one question to a shared memory
    may take.
    """

    place: str = field(repr=False)
    life: timedelta | float | None = None
    """None: what the setting has by default."""
    timeout: timedelta | float = TIMEOUT

    def __post_init__(self) -> None:
        if self.place != MEMORY and not _is_address(self.place):
            raise ValueError(f"a front is 'memory' or redis://host:6379/0, one of {', '.join(SHARED)}")
        for name in ("life", "timeout"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                object.__setattr__(self, name, value := timedelta(seconds=value))
            if value is None and name == "life":
                continue
            if not isinstance(value, timedelta) or value <= timedelta() or (self.shared and value > LONGEST):
                raise ValueError(f"{name} is longer than 0 and at a Redis at most {LONGEST}")

    @property
    def shared(self) -> bool:
        """Whether other processes see it, too."""
        return self.place != MEMORY

    @property
    def span(self) -> Duration:
        """Its life, as the model counts it."""
        assert isinstance(self.life, timedelta)  # the setting has filled it in
        return self.life // timedelta(microseconds=1)

    @property
    def patience(self) -> float:
        """The seconds that a question may take."""
        assert isinstance(self.timeout, timedelta)
        return self.timeout.total_seconds()

    @property
    def shown(self) -> str:
        """Where it is, without the credentials in its URL."""
        if not self.shared:
            return self.place
        url = urlsplit(self.place)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def _is_address(place: str) -> bool:
    try:
        url = urlsplit(place)
    except (ValueError, AttributeError):  # no text at all
        return False
    return url.scheme in SHARED and bool(url.path if url.scheme == "unix" else url.hostname)


class StoreClock:
    """What time it is in the store, as far as its answers tell: not before `earliest`, and not after `latest`.

    The store says the time somewhere between a question and its answer, sometimes to the second only. Each answer gives
    two bounds, what was known before gives two more, which grow apart as clocks drift, and the narrower ones count. If
    they contradict each other, the store's clock was set, or it is another store's after a fail-over: then what was
    heard last counts alone. Nothing is known for longer than `FRESH` after an answer.

    What is believed ends by `latest`, and begins by `earliest`, so that it never counts for longer than it was to.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[float, Instant, Instant] | None = None
        """A moment of this process, and between which instants it was then in the store."""

    def heard(self, low: Instant, high: Instant, asked: float, answered: float) -> None:
        """The store said that it is between `low` and `high`, to a question of the moment `asked`."""
        known, high = self._known, high + math.ceil((answered - asked) * (1 + DRIFT) * SECOND)
        if known is not None and answered < known[0]:
            return  # somebody who asked later was told already
        earliest, latest = self.earliest(answered), self.latest(answered)
        if earliest is not None and latest is not None and max(low, earliest) <= min(high, latest):
            low, high = max(low, earliest), min(high, latest)
        self._known = answered, low, high

    def earliest(self, moment: float) -> Instant | None:
        """It was not before that in the store, at a moment of this process; None: that is not known."""
        known = self._known
        if known is None or moment - known[0] > FRESH:
            return None
        since = moment - known[0]
        return known[1] + math.floor((since - DRIFT * abs(since)) * SECOND)

    def latest(self, moment: float) -> Instant | None:
        """It was not after that in the store."""
        known = self._known
        if known is None or moment - known[0] > FRESH:
            return None
        since = moment - known[0]
        return known[2] + math.ceil((since + DRIFT * abs(since)) * SECOND)


# What is kept in a shared memory


class Entry(NamedTuple):
    """The answer of a completed record, as the store gave it."""

    finished: Finished | Record
    read_at: Instant
    """The store's clock when it was read."""
    until: Instant
    """The store's clock when it is not believed any more: never after the record's own end."""


class Held(NamedTuple):
    """A key in somebody's hands, as the store granted it."""

    fingerprint: str
    begun: Instant
    lease_until: Instant | None
    """None: the lock ends with its transaction, and how long that takes nobody knows."""
    until: Instant


def entry_bytes(entry: Entry) -> bytes:
    """An entry, to be sealed."""
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


def entry_of(plain: bytes, record_id: RecordId) -> Entry | None:
    """The entry that was written; None if another version wrote it, which is not guessed at."""
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
        return Entry(finished, facts["r"], facts["u"])
    except (KeyError, TypeError, ValueError):
        return None


def held_bytes(held: Held) -> bytes:
    """A held key, to be sealed."""
    return json.dumps([FORMAT, *held], separators=(",", ":")).encode()


def held_of(plain: bytes) -> Held | None:
    """The held key that was written; None if another version wrote it."""
    try:
        version, *facts = json.loads(plain)
        return Held(*facts) if version == FORMAT else None
    except (TypeError, ValueError):
        return None


# What a shared memory is told


class Command(NamedTuple):
    """One command: a read without a life, a write with one, a removal."""

    verb: bytes
    name: bytes
    value: bytes = b""
    life: Duration = 0

    @property
    def words(self) -> tuple[bytes | int, ...]:
        """As the server is told."""
        if self.verb in {KEEP, REPLACE}:
            millis = max(1, self.life // 1000)
            return (b"SET", self.name, self.value, b"PX", millis, *((b"NX",) if self.verb == KEEP else ()))
        return (self.verb, self.name)


GET: Final = b"GET"
DROP: Final = b"DEL"
KEEP: Final = b"SET NX"
"""Write what is not there: of two that read an answer, and of a reader and an operator, the first one's stays."""
REPLACE: Final = b"SET"
