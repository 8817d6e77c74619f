"""Sealing stored content under the current key, as flows.

`oncekey rekey` walks over the whole store, page by page. Content that is already sealed under the current
key is skipped, so a walk that was interrupted is simply run again. Content that was stored before sealing was
enabled is sealed too. Records that have an owner are left alone: the owner compares the memo that it read, and
seals its next writes under the current key. They are counted, and a later walk finds them ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from oncekey.core.envelopes import disclose, key_of_answer, key_of_text
from oncekey.core.errors import ConfigurationError
from oncekey.core.memo import was_not_sent
from oncekey.core.model import Parcel, Record, State
from oncekey.stores.sealed_content import SealedContent

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.enclosing import InUse
    from oncekey.core.flow import Flow
    from oncekey.core.resolution import Evidence
    from oncekey.ports.store import Reseal, Store
    from oncekey.sealing import Seal

PAGE: Final = 500
NOT_HERE: Final = (
    "this store cannot list its content, so the content cannot be sealed under another key: keep the old key until "
    "everything that it sealed has expired"
)
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Walked:
    """Counts of what the walk did."""

    looked: int = 0
    resealed: int = 0
    owned: int = 0
    """Records that have an owner."""
    closed: int = 0
    """Content that could not be opened: its key is missing, or has other bytes under that name."""
    moved: int = 0
    """Records that another actor wrote to at the same time."""

    def __add__(self, other: Walked) -> Walked:
        return Walked(
            self.looked + other.looked,
            self.resealed + other.resealed,
            self.owned + other.owned,
            self.closed + other.closed,
            self.moved + other.moved,
        )


@dataclass(frozen=True, slots=True)
class Stop(Generic[C]):
    """The counts of one page, and where the next one begins. None: this was the last page."""

    walked: Walked
    after: C | None


def walk_of(store: Store) -> Reseal:
    """The store's part for walking over its content; raises if the store has none."""
    if store.reseal is None:
        raise ConfigurationError(NOT_HERE)
    return store.reseal


def rekey_records(store: Store, seal: Seal, after: Record | None = None, limit: int = PAGE) -> Flow[Stop[Record]]:
    """One page of records."""
    reseal, content = walk_of(store), SealedContent(seal)
    page = yield from reseal.records(limit, after)
    walked = Walked()
    for record in page:
        walked += yield from _rekeyed(reseal, content, record)
    # Records that cannot be read are on no page, so only an empty page is the end.
    return Stop(walked, page[-1] if page else None)


def rekey_parcels(store: Store, seal: Seal, after: UUID | None = None, limit: int = PAGE) -> Flow[Stop[UUID]]:
    """One page of parcels and dead letters."""
    reseal, content = walk_of(store), SealedContent(seal)
    page = yield from reseal.parcels(limit, after)
    walked = Walked()
    for parcel in page:
        payload = _payload(content, parcel)
        walked += Walked(looked=1, closed=payload is None)
        if payload is not None and payload != parcel.payload:
            walked += _written((yield from reseal.rewrite_parcel(parcel, payload)))
    return Stop(walked, page[-1].id if len(page) == limit else None)


def rekey_evidence(store: Store, seal: Seal, after: int | None = None, limit: int = PAGE) -> Flow[Stop[int]]:
    """One page of evidence."""
    reseal, content = walk_of(store), SealedContent(seal)
    page = yield from reseal.evidence(limit, after or 0)
    walked = Walked()
    for evidence in page:
        text = _resealed(content, evidence)
        walked += Walked(looked=1, closed=text is None)
        if text is not None and text != evidence.report.resolution:
            walked += _written((yield from reseal.rewrite_evidence(evidence, text)))
    return Stop(walked, page[-1].id if len(page) == limit else None)


WALKS: Final[tuple[Callable[..., Flow[Stop[Any]]], ...]] = (rekey_records, rekey_parcels, rekey_evidence)
"""The walks that together cover all content."""


def seals(store: Store, limit: int) -> Flow[tuple[InUse, ...]]:
    """How much content is sealed under which key; empty for a store without such a walk."""
    return () if store.reseal is None else (yield from store.reseal.seals(limit))


def unopened(store: Store, seal: Seal, limit: int) -> Flow[int]:
    """How many of the first records have content that does not open, although there is a key of that name."""
    content, found = SealedContent(seal), 0
    for record in (yield from walk_of(store).records(limit)):
        opened = content.record(record)
        names = [None if opened.response is None else key_of_answer(opened.response)]
        names += [key_of_text(entry.result) for entry in opened.memo]
        found += any(name in set(seal.names) for name in names if name is not None)
    return found


def _rekeyed(reseal: Reseal, content: SealedContent, record: Record) -> Flow[Walked]:
    sealed = _record(content, record)
    if sealed is None:
        return Walked(looked=1, closed=1)
    if sealed == record:
        return Walked(looked=1)
    if record.state is State.IN_PROGRESS:
        return Walked(looked=1, owned=1)
    return Walked(looked=1) + _written((yield from reseal.rewrite(record, sealed)))


def _written(done: bool) -> Walked:  # noqa: FBT001  (what a write came to)
    return Walked(resealed=1) if done else Walked(moved=1)


def _record(content: SealedContent, record: Record) -> Record | None:
    """The record with all its content under the current key; None: some of it does not open."""
    current = content.seal.current
    response, request = record.response, record.request
    if response is not None and key_of_answer(response) != current:
        opened = content.response(response, record)
        if key_of_answer(opened) is not None:
            return None
        response = content.closed_answer(opened, record)
    closed = None if request is None else disclose(request)
    if request is not None and (closed is None or closed[0] != current):
        request = content.request(record)
        if disclose(request) is not None:
            return None
        request = content.closed_kept(request, record)
    memo = []
    for entry in record.memo:
        if was_not_sent(entry) or key_of_text(entry.result) == current:
            memo.append(entry)
            continue
        opened_entry = content.entry(entry, record)
        if key_of_text(opened_entry.result) is not None:
            return None
        memo.append(replace(opened_entry))  # a new entry has no stored form, so it is sealed again
    return replace(record, response=response, memo=content.closed_memo(tuple(memo), record), request=request)


def _payload(content: SealedContent, parcel: Parcel) -> str | None:
    if key_of_text(parcel.payload) == content.seal.current:
        return parcel.payload
    opened = content.parcel(parcel)
    return None if key_of_text(opened.payload) is not None else content.closed_parcel(opened).payload


def _resealed(content: SealedContent, evidence: Evidence) -> str | None:
    report = evidence.report
    if key_of_text(report.resolution) == content.seal.current:
        return report.resolution
    opened = content.report(report)
    return None if key_of_text(opened.resolution) is not None else content.closed_report(opened)
