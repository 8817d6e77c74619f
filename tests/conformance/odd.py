"""Shops that are odd and not wrong: what may be said about each of them, and what cannot be judged there."""

from __future__ import annotations

from conformance.shop import Way
from oncekey_check import CheckProfile

SAID: dict[Way, tuple[str, ...]] = {
    Way.NO_CHUNKS: (),
    Way.NO_SLOW_BODIES: (),
    Way.UUIDS: (),
    Way.UUIDS_422: ("keys.status",),
    Way.OPTIONAL: ("keys.missing",),
    Way.CONSTANT: (),
    Way.LOSERS_500: ("races.losers", "races.while-running"),
    Way.NO_REPLAY: ("replays.status", "replays.many"),
    Way.NEW_IDS: ("replays.bytes",),
    Way.STRICT: (),
    Way.NUMBERS_ONLY: (),
    Way.COERCES: (),
    Way.SUBSET: (),
    Way.SAME_COOKIE: (),
    Way.REVISION: (),
    Way.OPEN: (),
    Way.NO_ODD_HEADERS: (),
    Way.PAGED: (),
    Way.LIMITED: (),
    Way.ECHO: (),
    Way.SOLD_OUT: (),
    Way.WINDOW: (),
    Way.RESTARTED: (),
    Way.HTTP_DATES: (),
    Way.BODY_MARKER: ("replays.bytes",),
    Way.LOCKED: ("races.while-running",),
    Way.TOO_EARLY: ("races.while-running",),
    Way.REPLAY_IS_200: ("replays.status",),
    Way.BARE_ONLY: ("keys.quoted",),
    Way.SHORT_ONLY: (),
    Way.UNIQUE: (),
    Way.ACCEPTED: (),
    Way.LATER: (),
    Way.WAITS: (),
    Way.TEXTS: (),
    Way.QUERY_KEY: (),
    Way.PATH_KEY: (),
    Way.COMPRESSES: (),
}
"""The findings that are true of it. None of them says that something happened twice, or was shown to a stranger."""

UNDECIDED: dict[Way, tuple[str, ...]] = {
    Way.NO_CHUNKS: ("replays.chunked", "replays.chunked-other"),
    Way.NO_SLOW_BODIES: ("hang-ups.slowly",),
    Way.UUIDS: ("keys.longest", "keys.case"),
    Way.UUIDS_422: ("keys.longest", "keys.case"),
    Way.OPTIONAL: ("keys.explained", "keys.empty", "leaks.distinguished"),
    Way.LOSERS_500: ("races.retry-after",),
    Way.NO_REPLAY: (
        "replays.bytes",
        "replays.headers",
        "replays.marked",
        "mismatches.first-stays",
        "races.answered",
        "hang-ups.retried",
    ),
    Way.STRICT: ("mismatches.array-order",),
    Way.SUBSET: ("mismatches.array-order",),
    Way.OPEN: ("tenants.no-pass", "tenants.not-spoilt"),
    Way.SHORT_ONLY: ("keys.longest", "keys.case"),
    Way.CONSTANT: ("tenants.unseen",),
    Way.NO_ODD_HEADERS: ("keys.malformed", "keys.tricky"),
    Way.PAGED: (
        "keys.whole",
        "keys.longest",
        "keys.quoted",
        "keys.bare",
        "keys.two-spellings",
        "keys.parameters",
        "keys.case",
        "keys.not-deduplication",
        "keys.field-name",
        "replays.one-effect",
        "replays.white-space",
        "replays.escapes",
        "replays.encoding",
        "replays.chunked",
        "mismatches.nothing-happens",
        "mismatches.while-running",
        "mismatches.query",
        "races.2",
        "races.10",
        "races.50",
        "tenants.same-caller",
        "hang-ups.head",
        "hang-ups.body",
        "hang-ups.last-byte",
        "hang-ups.sent",
        "hang-ups.answered",
        "hang-ups.slowly",
        "others.get-current",
        "others.get-takes-no-key",
    ),
}
"""What speaks neither for nor against it, where effects are counted."""

SUPPLIED = (Way.SOLD_OUT, Way.WINDOW, Way.RESTARTED)
"""What can be judged here depends on how far a run comes before the supply ends, or on when the server is away."""

PROFILES: dict[Way, CheckProfile] = {
    Way.LOCKED: CheckProfile.IETF,
    Way.TOO_EARLY: CheckProfile.IETF,
    Way.BARE_ONLY: CheckProfile.STRIPE,
}
"""The profile by which it is right, where the strict one wants something else."""
