"""The state of a store: counts of its records and parcels, a headline, the outcomes of requests, and pending work.

The console's overview and `oncekey stats --watch` use the same data. The store has no history of its counts, so this
process keeps each reading for a while. A caller with more history, such as a metrics backend, passes another
`History`.

Listings are walks over records. A walk follows one index, newest first. It reads a bounded number of entries and skips
those that do not match, so that a page costs the same whatever the size of the table; the next page continues where it
stopped. Counts of pending work stop at a limit, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from uuid import UUID

from oncekey.core.model import (
    MINUTE,
    SECOND,
    DeadLetter,
    Duration,
    Effects,
    Instant,
    Outcome,
    ParcelKind,
    Record,
    State,
)
from oncekey.core.upkeep import percentile

if TYPE_CHECKING:
    from oncekey.core.transitions import AuditEntry

MISSED_BEATS: Final = 3
"""The number of missed heartbeats after which a worker counts as dead."""


@dataclass(frozen=True, slots=True)
class Group:
    """Records of one operation in one state."""

    state: State
    effects: Effects
    operation: str
    records: int
    stale: int
    """In progress, with an expired lease."""
    resumable: int
    """Released with finished steps, and not yet taken over."""
    expired: int
    """Expired, and not yet deleted."""
    oldest: Instant
    newest: Instant


@dataclass(frozen=True, slots=True)
class Queue:
    """Parcels of one topic that wait to be sent."""

    topic: str
    kind: ParcelKind
    parcels: int
    held: int
    oldest_due: Instant


@dataclass(frozen=True, slots=True)
class Letters:
    """Dead letters of one topic: no worker retries them."""

    topic: str
    kind: ParcelKind
    letters: int
    oldest: Instant


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work that waits for a worker or an operator: how much, and since when."""

    what: str
    count: int
    oldest: Instant | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The numbers behind the gauges. All of them use indexes, so the cost does not grow with finished records."""

    now: Instant
    records: Mapping[str, int]
    """Unfinished records by state, and `finished` ones: an estimate where counting them would read them all."""
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """All counts of a store, read at one moment."""

    now: Instant
    groups: tuple[Group, ...]
    queues: tuple[Queue, ...]
    letters: tuple[Letters, ...]
    waiting: tuple[Waiting, ...]

    def waiting_for(self, what: str) -> Waiting:
        """One kind of pending work: unknown, stale, resumable, expired, parcels_due, dead_letters."""
        return next((one for one in self.waiting if one.what == what), Waiting(what, 0, None))


def troubled(task: str, wrong: str) -> str:
    """The prefix of a failing task in a heartbeat, so that it does not count as running."""
    return f"{task} ({wrong})"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, as its last heartbeat described it."""

    name: str
    tasks: tuple[str, ...]
    started_at: Instant
    seen_at: Instant
    every: Duration
    """The interval of the worker's heartbeats."""
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The calls of INLINE handlers by operation, from the worker's application."""

    @property
    def troubled(self) -> tuple[str, ...]:
        """The failing tasks, with their errors."""
        return tuple(task for task in self.tasks if task.endswith(")"))

    def is_alive(self, now: Instant, silence: Duration | None = None) -> bool:
        """Whether its last heartbeat is recent: within `silence`, or else within `MISSED_BEATS` of its intervals."""
        allowed = MISSED_BEATS * self.every if silence is None else silence
        return now - self.seen_at <= allowed


@dataclass(frozen=True, slots=True)
class Roll:
    """All registered workers, with the store's clock."""

    now: Instant
    workers: tuple[Worker, ...]

    def inline_calls(self, operation: str) -> tuple[str, ...]:
        """The calls of an INLINE operation, from the workers' applications."""
        return tuple(dict.fromkeys(name for one in self.workers for name in one.calls.get(operation, ())))


WINDOWS: Final = {"15 min": 15 * MINUTE, "1 h": 60 * MINUTE, "6 h": 360 * MINUTE, "24 h": 1440 * MINUTE}
BUCKETS: Final = 60
RANKS: Final = (50, 95, 99)
"""The percentiles of how long requests take."""
ENDS: Final = 5000
"""How many finished requests are read per outcome."""
KEPT: Final = 5000
FRESH: Final = 5 * SECOND
"""How long one reading of the finished requests is shared by all viewers."""
EVERY: Final = 2 * SECOND
"""Readings within this time count as one sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Pending work at one moment."""

    at: Instant
    unknown: int
    pending: int
    in_progress: int
    failed_retryable: int
    dead: int
    lag: Duration
    """How long the oldest parcel has been due."""
    oldest_unknown: Duration
    workers: int


class History(Protocol):
    """Stores samples and returns them."""

    def add(self, sample: Sample) -> None:
        """Store a sample."""

    def since(self, at: Instant) -> Sequence[Sample]:
        """Samples younger than that, oldest first."""


class Recent:
    """The latest samples, in this process."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)

    def add(self, sample: Sample) -> None:
        """Store a sample, unless there is one for this moment."""
        if not self._samples or sample.at - self._samples[-1].at >= EVERY:
            self._samples.append(sample)

    def since(self, at: Instant) -> Sequence[Sample]:
        """Samples younger than that, oldest first."""
        return [one for one in self._samples if one.at >= at]


def sample_of(tally: Tally, roll: Roll) -> Sample:
    """The sample of one reading of the store."""

    def age(what: str) -> Duration:
        oldest = tally.of(what).oldest
        return 0 if oldest is None else max(0, tally.now - oldest)

    return Sample(
        at=tally.now,
        unknown=tally.of("unknown").found,
        pending=tally.of("pending").found,
        in_progress=tally.of("in_progress").found,
        failed_retryable=tally.of("failed_retryable").found,
        dead=tally.of("dead").found,
        lag=age("due"),
        oldest_unknown=age("unknown"),
        workers=sum(worker.is_alive(roll.now) for worker in roll.workers),
    )


def series(ends: Iterable[End], samples: Sequence[Sample], now: Instant, window: Duration) -> dict[str, Any]:
    """The data of all charts, for the page's script: columns of numbers, with timestamps in seconds."""
    width = max(window // BUCKETS, SECOND)
    start = (now - window) // width * width
    places = [start + number * width for number in range(BUCKETS + 1)]
    ended: Counter[tuple[str, int]] = Counter()
    took: dict[int, list[Duration]] = {place: [] for place in places}
    for end in ends:
        place = end.at // width * width
        ended[ending(end), place] += 1
        # A LOCAL request is written in one commit, so its record has no duration.
        if end.took > 0 and place in took:
            took[place].append(end.took)
    seconds = [place / SECOND for place in places]
    return {
        "now": now / SECOND,
        "outcomes": [seconds, *([ended[name, place] for place in places] for name in ENDINGS)],
        "latency": [seconds, *([_millis(took[place], rank) for place in places] for rank in RANKS)],
        "states": _columns(samples, ("unknown", "failed_retryable", "in_progress", "pending", "dead")),
        "lag": _columns(samples, ("lag", "oldest_unknown"), scale=SECOND),
        "workers": _columns(samples, ("workers",)),
    }


def headline(tally: Tally, roll: Roll) -> tuple[str, str]:
    """The condition of a store: a level for the colour and one sentence."""
    stuck, waiting = tally.of("stuck").found, queues(tally)
    need = "needs" if len(waiting) == 1 and tally.of(waiting[0][0]).found == 1 else "need"
    attention = f"{' and '.join(words for _, words in waiting)} {need} attention." if waiting else ""
    if not any(worker.is_alive(roll.now) for worker in roll.workers):
        return "bad", f"No worker is alive: nothing is swept, sent or resolved. {attention}".rstrip()
    if attention:
        return "wait", attention
    if stuck:
        return "note", f"{_counted(stuck, 'stuck request')}, to be released by a worker. Nothing needs attention."
    return "good", "Nothing needs attention."


def queues(tally: Tally) -> tuple[tuple[str, str], ...]:
    """Work that needs an operator: the name of each count that is not 0, and its text in the headline."""
    nouns = (("unknown", "unknown outcome"), ("dead", "dead letter"))
    return tuple((what, _counted(tally.of(what).found, noun)) for what, noun in nouns if tally.of(what).found)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


ENDINGS: Final = ("succeeded", "failed", "retryable", "unknown")


def ending(end: End) -> str:
    """How a request ended: one of ENDINGS."""
    match end.state:
        case State.UNKNOWN:
            return "unknown"
        case State.FAILED_RETRYABLE:
            return "retryable"
        case _:
            return "failed" if end.outcome is Outcome.FAILURE else "succeeded"


def _millis(took: list[Duration], rank: int) -> float | None:
    return percentile(took, rank) / 1000 if took else None


def _columns(samples: Sequence[Sample], names: Sequence[str], scale: int = 1) -> list[list[float]]:
    return [
        [sample.at / SECOND for sample in samples],
        *([getattr(sample, name) / scale for sample in samples] for name in names),
    ]


LOOKED: Final = 5000
"""How many entries of an index one page reads."""
MOST: Final = 10_000
"""Counts of pending work stop here: a larger number gives an operator no more information."""

WalkPosition: TypeAlias = tuple["Instant", str, str]
"""A position in a walk: the timestamp that orders it, the scope and the key."""

START: Final[WalkPosition] = (2**63 - 1, "", "")
"""The position before the newest record."""
FIRST: Final[WalkPosition] = (-1, "", "")
"""The position before the oldest record."""

LetterPosition: TypeAlias = tuple["Instant", UUID]
"""A position among the dead letters: when the last one died, and its id."""

FIRST_LETTER: Final[LetterPosition] = (-1, UUID(int=0))
"""The position before the oldest dead letter."""

UNFINISHED: Final = (State.UNKNOWN, State.FAILED_RETRYABLE, State.IN_PROGRESS, State.PENDING)
"""States that are walked in order of creation."""
FINISHED: Final = (State.COMPLETED, State.EXPIRED)
"""States that are walked in order of expiry: an index on their creation would cost every request a write."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Which records match; None matches any. The states are unfinished ones, or a single finished one."""

    states: tuple[State, ...] = UNFINISHED
    scope: str | None = None
    """With the scopes in it: those of a tenant's principals."""
    beginning: str | None = None
    """A part of the key's text."""
    operation: str | None = None
    effects: Effects | None = None
    error: str | None = None
    older: Duration = 0
    """Created at least that long ago; 0 is any."""
    younger: Duration = 0
    """Created less than that long ago; 0 is any."""
    stale: bool = False
    """Only records with an expired lease."""
    incarnation: UUID | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a walk."""

    now: Instant
    records: tuple[Record, ...]
    further: Mapping[State, WalkPosition]
    """By state, where the next page continues; a state that is missing was walked to its end."""
    broken_off: bool
    """Whether the walk stopped because it read enough entries, and not because it found enough records."""


@dataclass(frozen=True, slots=True)
class LetterWalk:
    """Which dead letters match; None matches any."""

    scope: str | None = None
    """With the scopes in it: those of a tenant's principals."""
    topic: str | None = None
    kind: ParcelKind | None = None
    error: str | None = None
    """A part of the last error's text."""
    older: Duration = 0
    """Dead for at least that long; 0 is any."""
    younger: Duration = 0
    """Dead for less than that long; 0 is any."""


@dataclass(frozen=True, slots=True)
class LetterStretch:
    """A part of a walk over dead letters."""

    now: Instant
    letters: tuple[DeadLetter, ...]
    further: LetterPosition | None
    """Where the next page begins; None: this was the last page."""
    broken_off: bool
    """Whether the walk stopped because it read enough entries, and not because it found enough letters."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number, counted up to MOST, and the timestamp of the oldest one."""

    found: int = 0
    oldest: Instant | None = None

    @property
    def more(self) -> bool:
        """Whether there may be more than were counted."""
        return self.found >= MOST


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of pending work: unfinished records by state, and `stuck` leases, `due` parcels and `dead` letters."""

    now: Instant
    counts: Mapping[str, Count]

    def of(self, what: str) -> Count:
        """One count; 0 if there is none of that kind."""
        return self.counts.get(what, _NONE)


_NONE: Final = Count()


@dataclass(frozen=True, slots=True)
class End:
    """How and when a request last ended, and the duration of its last run, if known."""

    state: State
    outcome: Outcome | None
    operation: str
    at: Instant
    took: Duration


@dataclass(frozen=True, slots=True)
class ParcelView:
    """A parcel of a record with all its fields."""

    id: UUID
    kind: ParcelKind
    topic: str
    payload: str
    downstream_key: str
    attempts: int
    created_at: Instant
    due_at: Instant | None
    held_until: Instant | None
    first_error: str | None
    last_error: str | None
    died_at: Instant | None

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter."""
        return self.died_at is not None


@dataclass(frozen=True, slots=True)
class Lines:
    """Some entries of the audit, newest first."""

    entries: tuple[AuditEntry, ...]
    further: int | None
    """The entry before which the next page ends; None for the last page."""
