"""A store whose content is sealed: values are sealed on their way to the store, and opened on their way back.

This is the one place between the engine and all stores: a store compares, keeps and returns sealed values like any
others, and the engine reads plain ones. The code goes by the types of arguments and results, not by the names of
methods, so a verb that a store gets later is covered as soon as its types are.

Three things need care.

* A store compares a memo as a whole. An entry that came from the store, or was written to it, remembers its stored form
  and is written again in that form, whatever key it was sealed under (`Sealable`).
* Content that cannot be opened is passed on as it is. `check_open` and `check_steps` refuse to replay it or to go on
  with it, the relay lets its parcel wait, and tools show that it is sealed; sweeper and reaper need none of it.
* Content that cannot be sealed is not stored: this counts as an outage of the store, which every caller can handle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import UUID

from oncekey.core import enclosing, envelopes
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.memo import was_not_sent
from oncekey.core.model import (
    SEALED_SCHEMA,
    Claim,
    Completed,
    Deferred,
    Effects,
    Finished,
    HeldParcel,
    Lease,
    MemoEntry,
    Parcel,
    Record,
    RecordId,
    Settled,
    Snapshot,
    StoredResponse,
)
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.core.operate import Forbidden, Move, Moved
from oncekey.core.resolution import CallReport
from oncekey.ops.stats import ParcelView
from oncekey.sealing import CannotOpenError

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey.core.operate import ParcelLocation
    from oncekey.ports.store import Store
    from oncekey.sealing import Seal

log = logging.getLogger("oncekey")

PARTS: Final = frozenset({"phases", "parcels", "outbox", "locks", "upkeep", "operate", "survey", "reconcile"})
NOT_SEALED: Final = "what is to be stored could not be sealed, so it was not stored: {error}"

_FIELDS: Final = [one.name for one in fields(Record)]
_VALUES: Final = attrgetter(*_FIELDS)
"""All fields of a record at once: copying them one by one by name takes as long as opening an answer."""
_RESPONSE, _MEMO, _REQUEST = (_FIELDS.index(name) for name in ("response", "memo", "request"))


class ContentOwner(NamedTuple):
    """The record, and its incarnation, that some content belongs to."""

    id: RecordId
    incarnation: UUID


def sealed_store(store: Store, seal: Seal) -> Store:
    """The same store, with its content sealed."""
    return cast("Store", _Speaker(store, Closing(seal)))


class Closing:
    """Seals and opens the values that pass between the engine and a store."""

    def __init__(self, seal: Seal) -> None:
        self.seal = seal

    # To the store

    def answer(self, settlement: Completed, place: ContentOwner) -> Completed:
        """Seal an answer; the same answer is sealed once, so that a repeated settlement writes the same bytes."""
        known: tuple[ContentOwner, Completed] | None = getattr(settlement, "sealed", None)
        if known is not None and known[0] == place:
            return known[1]
        response = settlement.response
        if response.schema_version == SEALED_SCHEMA:
            return settlement
        key_id, sealed = self._close(enclosing.plain_answer(response), enclosing.about_record(*place, "answer"))
        closed = Completed(enclosing.sealed_answer(response, key_id, sealed), settlement.outcome)
        object.__setattr__(settlement, "sealed", (place, closed))
        return closed

    def entry(self, entry: MemoEntry, place: ContentOwner) -> MemoEntry:
        """Seal a step's result, or take the form that it has in the store already."""
        if was_not_sent(entry) or envelopes.key_of_text(entry.result) is not None:
            return entry
        known: tuple[ContentOwner, str] | None = getattr(entry, "sealed", None)
        if known is not None and known[0] == place:
            text = known[1]
        else:
            tag = envelopes.tag_of(entry.result)
            plain = envelopes.untagged(tag, entry.result)
            text = enclosing.tagged(tag, self._close_text(plain, _about_step(entry.name, place)))
            object.__setattr__(entry, "sealed", (place, text))
        return MemoEntry(entry.name, entry.kind, text, entry.by_hand)

    def parcel(self, parcel: Parcel) -> Parcel:
        """Seal a parcel's payload."""
        if envelopes.is_sealed(parcel.payload):
            return parcel
        about = enclosing.about_parcel(parcel.incarnation, parcel.id)
        return replace(parcel, payload=self._close_text(parcel.payload, about))

    def claim(self, claim: Claim) -> Claim:
        """Seal the request that is kept for the completer."""
        if claim.request is None or envelopes.disclose(claim.request) is not None:
            return claim
        return replace(claim, request=self.kept(claim.request, enclosing.about_request(claim.id, claim.fingerprint)))

    def deferred(self, settlement: Deferred, place: ContentOwner) -> Deferred:
        """Seal the parcel of an accepted request, and the response of its 202."""
        accepted = settlement.accepted
        if accepted is not None and envelopes.disclose(accepted) is None:
            accepted = self.kept(accepted, enclosing.about_record(*place, "accepted"))
        return Deferred(self.parcel(settlement.parcel), accepted)

    def kept(self, plain: bytes, about: bytes) -> bytes:
        """Seal what is kept until the settlement: a request, or the response of a 202."""
        return enclosing.enclose(*self._close(plain, about))

    def report(self, report: CallReport) -> CallReport:
        """Seal evidence."""
        if envelopes.is_sealed(report.resolution):
            return report
        return replace(
            report,
            resolution=self._close_text(report.resolution, enclosing.about_evidence(report.source, report.event_id)),
        )

    # From the store

    def record(self, record: Record, known: StoredResponse | None = None) -> Record:
        """Open a record as far as possible; `known` is its answer, if the caller has just written it."""
        response, memo, request = record.response, record.memo, record.request
        closed = response is not None and response.schema_version == SEALED_SCHEMA
        if not (closed or memo or request):
            return record
        place = ContentOwner(record.id, record.incarnation)
        values = list(_VALUES(record))
        if closed and response is not None:
            values[_RESPONSE] = known or self.response(response, place)
        if memo:
            values[_MEMO] = tuple([self.opened_entry(entry, place) for entry in memo])
        if request is not None:
            values[_REQUEST] = self.request(record)
        return Record(*values)

    def finished(self, finished: Finished) -> Finished:
        """Open what a repeat reads."""
        response = finished.response
        if response is None or response.schema_version != SEALED_SCHEMA:
            return finished
        return Finished(
            finished.id,
            finished.incarnation,
            finished.operation,
            finished.effects,
            finished.fingerprint,
            self.response(response, ContentOwner(finished.id, finished.incarnation)),
            finished.expires_at,
        )

    def response(self, response: StoredResponse, place: ContentOwner) -> StoredResponse:
        """Open an answer, or return it as it is if it cannot be opened."""
        closed = None if response.body is None else envelopes.disclose(response.body)
        if closed is None:
            return response  # a listing, which does not read answers
        plain = self._open(closed, enclosing.about_record(*place, "answer"))
        return response if plain is None else enclosing.opened_answer(response, plain)

    def opened_parcel(self, parcel: Parcel) -> Parcel:
        """Open a parcel; one that cannot be opened is not delivered, and waits."""
        about = enclosing.about_parcel(parcel.incarnation, parcel.id)
        text = self._open_text(parcel.payload, about)
        return parcel if text is parcel.payload else replace(parcel, payload=text)

    def view(self, view: ParcelView, incarnation: UUID) -> ParcelView:
        """Open a parcel that is shown to an operator."""
        return replace(view, payload=self._open_text(view.payload, enclosing.about_parcel(incarnation, view.id)))

    def opened_report(self, report: CallReport) -> CallReport:
        """Open evidence."""
        text = self._open_text(report.resolution, enclosing.about_evidence(report.source, report.event_id))
        return report if text is report.resolution else replace(report, resolution=text)

    def opened_entry(self, entry: MemoEntry, place: ContentOwner) -> MemoEntry:
        """Open a step's result, which remembers its stored form."""
        tag = envelopes.tag_of(entry.result)
        inside = envelopes.untagged(tag, entry.result)
        if not envelopes.is_sealed(inside):
            object.__setattr__(entry, "sealed", (place, entry.result))  # it was stored before results were sealed
            return entry
        text = self._open_text(inside, _about_step(entry.name, place))
        if text is inside:
            return entry
        opened = MemoEntry(entry.name, entry.kind, enclosing.tagged(tag, text), entry.by_hand)
        object.__setattr__(opened, "sealed", (place, entry.result))
        return opened

    def request(self, record: Record) -> bytes:
        """Open what is kept until the settlement."""
        assert record.request is not None
        closed = envelopes.disclose(record.request)
        if closed is None:
            return record.request
        plain = self._open(closed, about_kept(record))
        return record.request if plain is None else plain

    def _close(self, plain: bytes, about: bytes) -> tuple[str, bytes]:
        try:
            return self.seal.seal(plain, about)
        except Exception as error:  # a seal of the application may raise anything
            raise StoreUnavailableError(NOT_SEALED.format(error=type(error).__name__)) from error

    def _close_text(self, plain: str, about: bytes) -> str:
        return enclosing.enclose_text(*self._close(plain.encode("utf-8", "surrogatepass"), about))

    def _open(self, closed: tuple[str, bytes], about: bytes) -> bytes | None:
        try:
            return self.seal.open(*closed, about)
        except CannotOpenError:
            return None  # the code that would use it refuses to
        except Exception as error:  # noqa: BLE001  (whatever a seal of the application's own may raise)
            log.error("oncekey: opening what is %s failed: %s", envelopes.said_of(closed[0]), type(error).__name__)
            return None

    def _open_text(self, stored: str, about: bytes) -> str:
        closed = envelopes.disclose_text(stored)
        plain = None if closed is None else self._open(closed, about)
        return stored if plain is None else plain.decode("utf-8", "surrogatepass")


def about_kept(record: Record) -> bytes:
    """What the kept part of a record is bound to."""
    if record.effects is Effects.OUTBOX:
        return enclosing.about_record(record.id, record.incarnation, "accepted")
    return enclosing.about_request(record.id, record.fingerprint)


def _about_step(name: str, place: ContentOwner) -> bytes:
    return enclosing.about_record(*place, f"step {name}")


class _Speaker:
    """A store, or a part of one, whose arguments `closing` seals and whose results it opens.

    The arguments of a method tell which record it is about.
    """

    def __init__(self, inner: Any, closing: Closing) -> None:  # noqa: ANN401  (any of the protocols)
        self._inner = inner
        self._closing = closing

    @property
    def unsealed(self) -> Any:  # noqa: ANN401  (any of the protocols)
        """The store itself, for code that has to know its type."""
        return self._inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the protocol has)
        found = getattr(self._inner, name)
        # `parcels` is a part of a store, and a method of two of its parts.
        if name in PARTS and not callable(found):
            made: Any = None if found is None else _Speaker(found, self._closing)
        elif not callable(found):
            return found
        elif name in _OWN_WAYS:
            made = partial(_OWN_WAYS[name], self._closing, found)
        else:
            made = partial(_close_arguments, self._closing, found, name)
        setattr(self, name, made)
        return made


def _close_arguments(closing: Closing, method: Callable[..., Any], verb: str, *given: Any, **named: Any) -> Any:  # noqa: ANN401
    place = _place_of((*given, *named.values()) if named else given)
    down = [_down(closing, one, place, verb) for one in given]
    made = method(*down, **{name: _down(closing, one, place, verb) for name, one in named.items()})
    if not isinstance(made, Generator):
        return made  # one statement, whose rows have no content
    return _open_results(closing, made, given[0] if given and type(given[0]) is UUID else None)


def _open_results(closing: Closing, flow: Generator[Any, Any, Any], life: UUID | None) -> Generator[Any, Any, Any]:
    return _up(closing, (yield from flow), life)


def _move(
    closing: Closing,
    method: Callable[..., Flow[Moved | Forbidden]],
    record_id: RecordId,
    deciding: Callable[[Snapshot, tuple[ParcelLocation, ...]], Move | Forbidden],
    noting: Callable[[Move], Any],
) -> Flow[Moved | Forbidden]:
    """Decide on the opened record, and write the move sealed."""
    open_move: list[Move] = []

    def decided(seen: Snapshot, parcels: tuple[ParcelLocation, ...]) -> Move | Forbidden:
        move = deciding(_up(closing, seen), parcels)
        if isinstance(move, Forbidden):
            return move
        open_move[:] = [move]
        place = ContentOwner(move.seen.id, move.seen.incarnation)
        return replace(
            move,
            answer=None if move.answer is None else closing.answer(move.answer, place),
            memo=tuple([closing.entry(entry, place) for entry in move.memo]),
        )

    moved = yield from method(record_id, decided, noting)
    if isinstance(moved, Forbidden):
        return moved
    return Moved(open_move[-1], _up(closing, moved.snapshot))


def _settle(
    closing: Closing,
    method: Callable[..., Generator[Any, Any, Settled]],
    lease: Lease,
    settlement: Any,  # noqa: ANN401
) -> Generator[Any, Any, Settled]:
    """Settle; the caller knows its own answer, so it is not opened again."""
    settled = yield from method(lease, _down(closing, settlement, ContentOwner(lease.id, lease.incarnation), "settle"))
    record, now = settled.snapshot.record, settled.snapshot.now
    if record is None:
        return settled
    known = settlement.response if settled.ours and type(settlement) is Completed else None
    return Settled(settled.ours, Snapshot(closing.record(record, known), now))


def _last_result(
    _: Closing, method: Callable[..., Flow[MemoEntry | None]], operation: str, phase: str
) -> Flow[MemoEntry | None]:
    """The result of any record, so its place is not known and it cannot be opened: a sealed one is left out."""
    entry = yield from method(operation, phase)
    return None if entry is None or envelopes.key_of_text(entry.result) is not None else entry


_OWN_WAYS: Final[Mapping[str, Callable[..., Any]]] = {
    "move": _move,
    "last_result": _last_result,
    "settle": _settle,
    "settling": _settle,
}


def _place_of(given: tuple[Any, ...]) -> ContentOwner | None:
    """The record that the arguments are about. A retried LOCAL request goes on in the incarnation that it found."""
    found: ContentOwner | None = None
    for one in given:
        if isinstance(one, WriteTarget):
            if one.kind is WriteKind.RETRYABLE and one.seen is not None:
                return ContentOwner(one.seen.id, one.seen.incarnation)
        elif found is None and isinstance(one, Lease | Claim | Record):
            found = ContentOwner(one.id, one.incarnation)
    return found


def _down(closing: Closing, value: Any, place: ContentOwner | None, verb: str) -> Any:  # noqa: ANN401
    kind = type(value)
    if kind is tuple:
        return tuple([_down(closing, one, place, verb) for one in value])
    if kind is Completed:
        return closing.answer(value, _required(place))
    if kind is MemoEntry:
        return closing.entry(value, _required(place))
    if kind is Claim:
        return closing.claim(value)
    if kind is Parcel:
        return closing.parcel(value)
    if kind is Deferred:
        return closing.deferred(value, _required(place))
    if kind is CallReport:
        return closing.report(value)
    if kind is HeldParcel and verb == "result":  # the only verb that may write the payload; others prove the parcel
        return replace(value, parcel=closing.parcel(value.parcel))
    return value


def _required(place: ContentOwner | None) -> ContentOwner:
    if place is None:
        raise TypeError("content is sealed for a record, and nothing here says for which one")
    return place


def _up(closing: Closing, value: Any, life: UUID | None = None) -> Any:  # noqa: ANN401
    kind = type(value)
    if kind is Record:
        return closing.record(value)
    if kind is Snapshot:
        return value if value.record is None else Snapshot(closing.record(value.record), value.now)
    if kind is Finished:
        return closing.finished(value)
    if kind is Parcel:
        return closing.opened_parcel(value)
    if kind is CallReport:
        return closing.opened_report(value)
    if kind is ParcelView and life is not None:
        return closing.view(value, life)
    if kind is tuple:
        return tuple([_up(closing, one, life) for one in value])
    if kind is dict:
        return {name: _up(closing, one, life) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[_up(closing, one, life) for one in value])
    if kind in _CLOSED_KINDS or not is_dataclass(value):
        return value
    return _up_fields(closing, value, life)


def _up_fields(closing: Closing, value: Any, life: UUID | None = None) -> Any:  # noqa: ANN401
    changes = {}
    for one in fields(value):
        there = getattr(value, one.name)
        made = _up(closing, there, life)
        if made is not there:
            changes[one.name] = made
    return replace(value, **changes) if changes else value


_CLOSED_KINDS: Final = frozenset({Lease, RecordId, Move, StoredResponse})
"""Types without content that could be opened."""
