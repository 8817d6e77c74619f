"""Compares the provider's ledger with the store: charges that are missing on one side, and amounts that differ.

`compare` is a pure function over the provider's charges and the recorded calls. `entries` reads a provider's ledger
from a CSV file, a JSON file, or a URL that returns JSON; any other iterable of `LedgerEntry`s works as an adapter.
`read` finds the calls that requests announced, with their records.
"""

from __future__ import annotations

import csv
import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from oncekey.canonical.digests import downstream_key
from oncekey.core import memo
from oncekey.core.envelopes import key_of_answer, key_of_text
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import Flow, adrive
from oncekey.core.keys import key_digest
from oncekey.core.model import Effects, Instant, Outcome, Record, State
from oncekey.core.operate import Search
from oncekey.core.resolution import AnnouncedCall, known_outcome
from oncekey.engine.operate import operations_of
from oncekey.engine.reconcile import reconcile_of

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports.store import Store


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One charge in the provider's ledger."""

    downstream_key: str | None
    provider_id: str | None
    amount: Decimal | None = None
    currency: str | None = None
    at: str | None = None


class Belief(StrEnum):
    """The recorded outcome of a call."""

    MADE = "made"
    REFUSED = "refused"
    OPEN = "open"
    """The outcome is not known yet."""
    GONE = "gone"
    """The record has expired: only the announcement of the call is left."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One recorded call, and its outcome."""

    downstream_key: str
    belief: Belief
    operation: str
    scope: str
    key_digest: str
    provider_id: str | None = None
    amount: Decimal | None = None
    currency: str | None = None


class DifferenceKind(StrEnum):
    """The kinds of differences."""

    ORPHAN = "orphan_charge"
    MISSING = "missing_charge"
    TWICE = "charged_twice"
    REFUSED = "charged_though_refused"
    OPEN = "charged_while_unknown"
    AMOUNT = "amount_differs"
    CURRENCY = "currency_differs"


MEANING: Final = {
    DifferenceKind.ORPHAN: "the provider has a charge for a call that was never announced",
    DifferenceKind.MISSING: "the record shows a charge that the provider does not have",
    DifferenceKind.TWICE: "the provider charged one call more than once",
    DifferenceKind.REFUSED: "the record shows no charge, but the provider has one",
    DifferenceKind.OPEN: "the provider charged, but the outcome of the record is still unknown",
    DifferenceKind.AMOUNT: "the amounts of the charge differ",
    DifferenceKind.CURRENCY: "the currencies of the charge differ",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference, for an operator to check."""

    kind: DifferenceKind
    ours: Expected | None
    theirs: LedgerEntry | None
    charges: int = 1


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The result of a comparison, with the differences."""

    charges: int
    calls: int
    agreed: int
    differences: tuple[Difference, ...]

    @property
    def agree(self) -> bool:
        """Whether the ledgers agree."""
        return not self.differences


def compare(ledger: Iterable[LedgerEntry], expected: Iterable[Expected]) -> LedgerReport:
    """Match every charge with its call, by the downstream key or by the provider's id, and report the differences."""
    calls = _by_key(expected)
    # An id that two calls share, such as the 1001 of two accounts, identifies neither of them.
    ids = Counter(one.provider_id for one in calls.values())
    named = {one.provider_id: one for one in calls.values() if ids[one.provider_id] == 1}
    found: dict[str, list[LedgerEntry]] = defaultdict(list)
    differences: list[Difference] = []
    charges = 0
    for entry in ledger:
        charges += 1
        ours = calls.get(entry.downstream_key or "") or named.get(entry.provider_id or "")
        if ours is None:
            differences.append(Difference(DifferenceKind.ORPHAN, None, entry))
        else:
            found[ours.downstream_key].append(entry)
    agreed = 0
    for key, ours in calls.items():
        against = list(_against(ours, found.get(key, [])))
        differences.extend(against)
        agreed += not against
    order = list(DifferenceKind)
    ranked = sorted(differences, key=lambda one: order.index(one.kind))
    return LedgerReport(charges, len(calls), agreed, tuple(ranked))


def _by_key(expected: Iterable[Expected]) -> dict[str, Expected]:
    """The calls by downstream key. If several incarnations made the same call, one that was executed counts."""
    calls: dict[str, Expected] = {}
    for one in expected:
        there = calls.get(one.downstream_key)
        if there is None or there.belief is not Belief.MADE:
            calls[one.downstream_key] = one
    return calls


def _against(ours: Expected, theirs: list[LedgerEntry]) -> Iterable[Difference]:
    if not theirs:
        if ours.belief is Belief.MADE:
            yield Difference(DifferenceKind.MISSING, ours, None, charges=0)
        return
    first = theirs[0]
    ids = Counter(entry.provider_id for entry in theirs)
    if len(ids) > 1 or (None in ids and len(theirs) > 1):
        yield Difference(DifferenceKind.TWICE, ours, first, charges=len(theirs))
    if ours.belief is Belief.REFUSED:
        yield Difference(DifferenceKind.REFUSED, ours, first, charges=len(theirs))
    if ours.belief is Belief.OPEN:
        yield Difference(DifferenceKind.OPEN, ours, first, charges=len(theirs))
    if ours.amount is not None and first.amount is not None and ours.amount != first.amount:
        yield Difference(DifferenceKind.AMOUNT, ours, first)
    if ours.currency is not None and first.currency is not None and ours.currency.upper() != first.currency.upper():
        yield Difference(DifferenceKind.CURRENCY, ours, first)


FIELDS: Final = ("downstream_key", "provider_id", "amount", "currency", "at")
PATIENCE: Final = 60.0
_LARGEST: Final = 512 * 1024 * 1024


def entries(place: str, columns: Mapping[str, str] | None = None) -> Iterator[LedgerEntry]:
    """The charges in a file or at a URL; `columns` maps field names to the ledger's names."""
    names = {**{field: field for field in FIELDS}, **(columns or {})}
    for number, row in enumerate(_rows(place), start=1):
        yield _entry(row, names, f"{place}, entry {number}")


def _rows(place: str) -> Iterable[Mapping[str, Any]]:
    if "://" in place:
        return _listed(_fetched(place), place)
    path = Path(place)
    if not path.is_file():
        raise ConfigurationError(f"the ledger {place} does not exist")
    if path.suffix.lower() == ".json":
        return _listed(path.read_bytes(), place)
    return _csv(path)


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def _fetched(url: str) -> bytes:
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigurationError(f"{url}: a ledger is a file, or an http:// or https:// URL")
    try:
        with urlopen(Request(url, headers={"Accept": "application/json"}), timeout=PATIENCE) as reply:  # noqa: S310
            body: bytes = reply.read(_LARGEST)
            return body
    except OSError as error:
        raise ConfigurationError(f"{url} did not return its ledger: {error}") from None


def _listed(body: bytes, place: str) -> list[Mapping[str, Any]]:
    """The objects of a JSON list, or of the only list in a JSON object."""
    try:
        document = json.loads(body, parse_float=Decimal)
    except ValueError:
        raise ConfigurationError(f"{place} is not JSON") from None
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list)]
        document = lists[0] if len(lists) == 1 else document
    if not isinstance(document, list) or not all(isinstance(one, dict) for one in document):
        raise ConfigurationError(f"{place} contains no list of charges")
    return document


def _entry(row: Mapping[str, Any], names: Mapping[str, str], where: str) -> LedgerEntry:
    given = {field: _text(row.get(name)) for field, name in names.items()}
    if given["downstream_key"] is None and given["provider_id"] is None:
        raise ConfigurationError(
            f"{where} has neither {names['downstream_key']!r} nor {names['provider_id']!r}: pass their names with "
            "--column FIELD=NAME"
        )
    try:
        amount = None if given["amount"] is None else Decimal(given["amount"])
    except InvalidOperation:
        raise ConfigurationError(f"{where}: {given['amount']!r} is not an amount") from None
    return LedgerEntry(given["downstream_key"], given["provider_id"], amount, given["currency"], given["at"])


def _text(value: Any) -> str | None:  # noqa: ANN401  (a cell of any type)
    return None if value is None or value == "" else str(value)


PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Pointers:
    """JSON pointers to the amounts, in a call's result, or else in the response; None: not compared."""

    amount: str | None = None
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """How to read the recorded calls from the store."""

    since: Instant = 0
    pointers: Pointers = field(default_factory=Pointers)
    inline: Mapping[str, str] = field(default_factory=dict)
    """The calls of INLINE handlers by operation, which do not announce them: the name in `op.downstream_key(name)`."""


def read(store: Store, books: Books) -> Flow[list[Expected]]:
    """The calls that requests announced since `books.since`, and the calls of the given INLINE operations."""
    found: list[Expected] = []
    after: AnnouncedCall | None = None
    while True:
        page = yield from reconcile_of(store).calls(books.since, PAGE, after)
        found += [_expected(call, record, books.pointers) for call, record in page]
        if len(page) < PAGE:
            break
        after = page[-1][0]
    known = {one.downstream_key for one in found}
    for operation, phase in books.inline.items():
        calls = yield from _inline(store, operation, phase, books)
        found += [one for one in calls if one.downstream_key not in known]
    return found


def _inline(store: Store, operation: str, phase: str, books: Books) -> Flow[list[Expected]]:
    found: list[Expected] = []
    before: tuple[Instant, str, str] | None = None
    wanted = Search(operation=operation, effects=Effects.INLINE)
    while True:
        page = yield from operations_of(store).search(wanted, PAGE, before)
        for record in page.records:
            if record.created_at < books.since:
                return found
            found.append(_of_inline(record, phase))
        if len(page.records) < PAGE:
            return found
        last = page.records[-1]
        before = (last.created_at, last.id.scope, last.id.key)


def _of_inline(record: Record, phase: str) -> Expected:
    return Expected(
        downstream_key=downstream_key(record.seed, phase),
        belief=_belief(record, phase),
        operation=record.operation,
        scope=record.id.scope,
        key_digest=key_digest(record.id.key),
    )


def _expected(call: AnnouncedCall, record: Record | None, pointers: Pointers) -> Expected:
    belief = Belief.GONE if record is None else _belief(record, call.phase)
    documents = [] if record is None or belief is not Belief.MADE else _documents(record, call.phase)
    currency = _at(documents, pointers.currency)
    return Expected(
        downstream_key=call.downstream_key,
        belief=belief,
        operation=call.operation,
        scope=call.id.scope,
        key_digest=key_digest(call.id.key),
        provider_id=call.provider_id,
        amount=_number(_at(documents, pointers.amount)),
        currency=currency if isinstance(currency, str) else None,
    )


def _belief(record: Record, phase: str) -> Belief:
    match known_outcome(record, phase):
        case Outcome.SUCCESS:
            return Belief.MADE
        case Outcome.FAILURE:
            return Belief.REFUSED
        case None:
            undecided = record.state in {State.UNKNOWN, State.IN_PROGRESS, State.PENDING} or record.intent is not None
            return Belief.OPEN if undecided else Belief.REFUSED


def _documents(record: Record, phase: str) -> list[Any]:
    """The documents that may contain the amount: the call's own result first, then the response."""
    results = [entry.result for entry in record.memo if entry.name == phase and record.effects is Effects.PHASED]
    found: list[Any] = [memo.decode(result) for result in results if key_of_text(result) is None]
    response = record.response
    body = None if response is None or key_of_answer(response) is not None else response.body
    if body:
        with suppress(ValueError):
            found.append(json.loads(body, parse_float=Decimal))
    return found


def _at(documents: list[Any], pointer: str | None) -> Any:  # noqa: ANN401  (a value of any type)
    if pointer is None:
        return None
    for document in documents:
        place = document
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping):
                place = place.get(name)
            elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            else:
                place = None
        if place is not None:
            return place
    return None


def _number(value: Any) -> Decimal | None:  # noqa: ANN401  (a value of any type)
    if isinstance(value, bool) or not isinstance(value, int | str | float | Decimal):
        return None
    try:
        return Decimal(str(value))
    except InvalidOperation:
        return None


# The provider's ledger next to the recorded calls

Entries = Callable[["Instant"], "Iterable[LedgerEntry] | Awaitable[Iterable[LedgerEntry]]"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """How to read the provider's ledger and the recorded calls.

    `entries` takes a timestamp in microseconds and returns the charges since then. `pointers` locates the amounts in
    results; `inline` names the calls of INLINE operations, which do not announce them. `minor_units` declares that the
    amounts are in the currency's minor unit, such as cents: the console then shows them in major units.
    """

    entries: Entries
    pointers: Pointers = field(default_factory=Pointers)
    inline: Mapping[str, str] = field(default_factory=dict)
    minor_units: bool = False

    async def compared(self, engine: AsyncEngine, since: Instant) -> LedgerReport:
        """Compare the ledgers since a timestamp; the report has the differences."""
        found = self.entries(since)
        theirs = await found if inspect.isawaitable(found) else found
        ours = await adrive(read(engine.store, Books(since, self.pointers, self.inline)), engine.driver.run)
        return compare(theirs, ours)
