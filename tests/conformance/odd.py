"""Shops that are odd and not wrong: what may be said about each of them, and what cannot be judged there."""

from __future__ import annotations

from conformance.shop import Way

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
}
"""The findings that are true of it. None of them says that something happened twice, or was shown to a stranger."""

UNDECIDED: dict[Way, tuple[str, ...]] = {
    Way.NO_CHUNKS: ("replays.chunked", "replays.chunked-other"),
    Way.NO_SLOW_BODIES: ("hang-ups.slowly",),
    Way.UUIDS: ("keys.longest", "keys.case"),
    Way.UUIDS_422: ("keys.longest", "keys.case"),
    Way.OPTIONAL: ("keys.explained", "keys.empty", "leaks.told-apart"),
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
        "replays.chunked",
        "mismatches.nothing-happens",
        "mismatches.while-running",
        "mismatches.query",
        "races.2",
        "races.10",
        "races.50",
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
