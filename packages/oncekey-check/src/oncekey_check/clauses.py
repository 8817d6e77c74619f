"""The types of the tester: a clause, its verdicts, and the profiles by which it is judged.

`SendMode` records how the tester sent the requests of a finding, so that a script can reproduce it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey_check.raw_http import Answer, RawRequest

if TYPE_CHECKING:
    from oncekey_check.probe import Probe


class Way(StrEnum):
    """How a request reached the server."""

    PLAIN = "plain"
    """On a separate connection."""
    TOGETHER = "together"
    """At the same moment as others."""
    PIPELINED = "pipelined"
    """In one write with others, on one connection."""
    SLOWLY = "slowly"
    """The body in pieces."""
    CUT = "cut"
    """The client disconnected."""
    OVERLAPPING = "overlapping"
    """The second request was sent while the first was running."""
    INTERRUPTED = "interrupted"
    """A command was run during the request."""


@dataclass(frozen=True, slots=True)
class SendMode:
    """A way, and its details. `many` consecutive exchanges belong together."""

    way: Way = Way.PLAIN
    many: int = 1
    seconds: float = 0.0
    """The distance between two requests, or how long the client stayed."""
    sent: int = 0
    """The bytes that were sent before the client disconnected."""
    listened: bool = False
    """Whether the client waited for the beginning of the response before it disconnected."""
    after: tuple[str, ...] = ()
    """The options whose commands were run before the request, or while it ran."""


PLAIN = SendMode()


class CheckProfile(StrEnum):
    """A set of guarantees that an API may give."""

    IETF = "ietf"
    """The IETF draft (revision 07): quoted keys, 400, 409 and 422."""
    STRIPE = "stripe"
    """The de-facto standard: bare keys, which are optional; 400 for another request under a used key; a marker."""
    CONFLICT = "conflict"
    """Like Stripe, but 409 for another request under a used key, and no marker."""
    STRICT_MONEY = "strict-money"
    """For APIs that move money: the draft, and the safe choice wherever the draft leaves one open."""


class Area(StrEnum):
    """The subject of a clause."""

    KEYS = "keys"
    REPLAYS = "replays"
    MISMATCHES = "mismatches"
    RACES = "races"
    TENANTS = "tenants"
    FAILURES = "failures"
    HANGUPS = "hang-ups"
    FINALS = "final responses"
    INSTANCES = "instances and leases"
    CRASHES = "crashes and outages"
    LEAKS = "leaks"
    OTHERS = "other methods and description"


_AREAS: Final = {
    "keys": Area.KEYS,
    "replays": Area.REPLAYS,
    "mismatches": Area.MISMATCHES,
    "races": Area.RACES,
    "tenants": Area.TENANTS,
    "failures": Area.FAILURES,
    "hang-ups": Area.HANGUPS,
    "finals": Area.FINALS,
    "instances": Area.INSTANCES,
    "leases": Area.INSTANCES,
    "crashes": Area.CRASHES,
    "outages": Area.CRASHES,
    "leaks": Area.LEAKS,
    "others": Area.OTHERS,
}
"""The first word of a clause's id -> its area."""


LIKELY: Final = (
    Area.REPLAYS,
    Area.HANGUPS,
    Area.RACES,
    Area.FAILURES,
    Area.CRASHES,
    Area.INSTANCES,
    Area.TENANTS,
    Area.FINALS,
    Area.MISMATCHES,
    Area.LEAKS,
    Area.KEYS,
    Area.OTHERS,
)
"""The areas by how often an ordinary client is affected: a plain retry first."""


class Severity(IntEnum):
    """The possible consequence of a broken clause."""

    LOW = 1
    """Clients get less information than they could."""
    MEDIUM = 2
    """Clients get stuck, or receive a wrong response."""
    HIGH = 3
    """A client acts on a wrong response."""
    CRITICAL = 4
    """An effect happens twice, or another caller sees it."""


class Need(StrEnum):
    """A requirement of a clause, named by the option that provides it."""

    COUNT = "--count-url"
    SLOW = "--slow-header"
    OTHER_TENANT = "--other-tenant-header"
    SAME_CALLER = "--same-caller-header"
    OTHER_BODY = "--other-body"
    OTHER_URL = "--other-url"
    JSON = "--body (JSON)"
    FAIL = "--fail-header"
    CREDENTIALS = "--header (with credentials)"
    UNSAFE = "--unsafe-methods"
    DECLINED = "--declined-body"
    LARGE = "--large-header"
    ALSO = "--also-url"
    LEASE = "--lease"
    CRASH = "--crash-command"
    OUTAGE = "--store-down-command"


EVERY: Final = frozenset(CheckProfile)
SAFE: Final = frozenset({CheckProfile.STRICT_MONEY})
DRAFT: Final = frozenset({CheckProfile.IETF, CheckProfile.STRICT_MONEY})
MARKED: Final = frozenset({CheckProfile.STRIPE, CheckProfile.STRICT_MONEY})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its response, and how the request was sent if that matters."""

    request: RawRequest
    answer: Answer
    how: str = ""
    mode: SendMode = PLAIN


@dataclass(frozen=True, slots=True)
class Passed:
    """The API satisfies the clause."""


class Harm(IntEnum):
    """The harm that was observed, in ascending order."""

    UNTOLD = 1
    """Clients get less information than they could."""
    WRONG = 2
    """A client received a wrong response."""
    UNPROTECTED = 3
    """A request was executed outside the protection of any key."""
    LOST = 4
    """An operation did not happen, or no retry receives its response any more."""
    LEAKED = 5
    """A caller saw data of another caller."""
    TWICE = 6
    """An effect happened more often than the client requested."""

    @property
    def words(self) -> str:
        """The harm as a report names it."""
        return _WORDS[self]


_WORDS: Final = {
    Harm.UNTOLD: "less information for clients",
    Harm.WRONG: "wrong response",
    Harm.UNPROTECTED: "executed without protection",
    Harm.LOST: "lost",
    Harm.LEAKED: "leaked",
    Harm.TWICE: "happened more than once",
}


@dataclass(frozen=True, slots=True)
class Failed:
    """The API violates the clause. The runner adds the exchange."""

    expected: str
    seen: str
    exchange: tuple[Exchange, ...] = ()
    only: frozenset[CheckProfile] = EVERY
    """The profiles in which that is wrong."""
    mild: frozenset[CheckProfile] = frozenset()
    """The profiles in which it is advice, even where the clause is a guarantee."""
    expected_in: Mapping[CheckProfile, str] = field(default_factory=dict, hash=False)
    """What a profile expects, where profiles differ."""
    headline: tuple[Harm, str] | None = None
    """The harm and the headline, where the clause's own headline would not describe what was observed."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The clause was not tried; it names the option that would allow it."""

    because: str
    pass_this: str = ""


@dataclass(frozen=True, slots=True)
class Inconclusive(Skipped):
    """The clause was tried, but the responses prove neither that the API satisfies it nor that it violates it."""


Verdict: TypeAlias = Passed | Failed | Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One guarantee: `must` are the profiles that require it, `should` those that only advise it.

    `sight` is set for guarantees about effects and replays. They cannot be judged if the responses to two fresh keys
    are equal and effects are not counted: a replay would look the same as an execution.
    """

    id: str
    title: str
    why: str
    fix: str
    """How the owner of an API fixes it, in one line."""
    severity: Severity
    requests: int
    judge: Callable[[Probe], Verdict]
    must: frozenset[CheckProfile] = EVERY
    should: frozenset[CheckProfile] = frozenset()
    needs: tuple[Need, ...] = ()
    sight: bool = False

    @property
    def area(self) -> Area:
        """The subject of the clause: the first word of its id."""
        return _AREAS[self.id.partition(".")[0]]


class InconclusiveError(Exception):
    """A clause cannot be judged after all; the runner reports it as `Inconclusive`."""

    def __init__(self, because: str, pass_this: str = "") -> None:
        super().__init__(because)
        self.verdict = Inconclusive(because, pass_this)
