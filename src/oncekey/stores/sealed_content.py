"""Seals and opens the content of rows, where `rows` and `worker_rows` encode and decode them.

Statements, and the stores that run them, compare and store sealed values like any others. A part of a store passes its
`Statements.content` to the functions that encode parameters and decode rows; it needs nothing else for a seal.

Four rules apply:

* A parameter is readable only if it is listed in `READABLE`. `check` refuses a statement with any other text or bytes
  that are not sealed, so content of a new kind is either sealed or not stored.
* A store compares a memo as a whole. An entry that was read from the store, or written to it, keeps its stored form
  and is written again in that form, whatever key it was sealed under (`Sealable`).
* Content that cannot be opened is passed on as it is. `check_open` and `check_steps` refuse to replay it or to resume
  with it, the relay lets its parcel wait, and tools show that it is sealed; sweeper and reaper do not need it.
* Content that cannot be sealed is not stored: this counts as an outage of the store, which every caller can handle.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from oncekey.core import enclosing, envelopes
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.memo import was_not_sent
from oncekey.core.model import SEALED_SCHEMA, Claim, Effects, Finished, MemoEntry, Parcel, Record, StoredResponse
from oncekey.sealing import CannotOpenError, Seal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from oncekey.core.flow import Value
    from oncekey.core.resolution import CallReport
    from oncekey.ops.stats import ParcelView
    from oncekey.stores.rows import ContentOwner

log = logging.getLogger("oncekey")

NOT_SEALED: Final = "the content could not be sealed, so it was not stored: {error}"
IN_CLEAR: Final = "the parameter {name} of the statement {statement} is neither sealed nor listed as readable"

_READABLE: Final = """
    scope key incarnation seen_incarnation operation effects recovery method path fingerprint seed owner outcome state
    last_error error recovery_point phase downstream_key digest id kind source event_id provider_id verdict name asked
    found held topic topics tasks calls notes key_digest actor trigger who why first last beginning index
    after after_scope after_key after_incarnation after_phase before_scope before_key place_scope
    place_key
    """
READABLE: Final = frozenset(_READABLE.split())
"""The parameters that a statement sends as they are."""
JOINED: Final = frozenset({"memo", "seen_memo", "parcels", "given", "seen"})
"""Parameters that `rows` joins from sealed parts, and those that are compared with stored content."""
_BEGINS: Final = (envelopes.TEXT_BEGINS, f'[["{enclosing.HEADER.decode()}", ')

_FIELDS: Final = [one.name for one in fields(Record)]
_VALUES: Final = attrgetter(*_FIELDS)
"""All fields of a record at once: copying them one by one takes as long as opening a response."""
_RESPONSE, _MEMO, _REQUEST = (_FIELDS.index(name) for name in ("response", "memo", "request"))


class SealedContent:
    """Seals the content of parameters, and opens the content of rows."""

    def __init__(self, seal: Seal) -> None:
        self.seal = seal

    def check(self, statement: str, params: Mapping[str, Value]) -> None:
        """Refuse a statement that would store an unlisted value in clear."""
        for name, value in params.items():
            if name in READABLE or name in JOINED or not isinstance(value, str | bytes):
                continue
            if not (value.startswith(_BEGINS) if isinstance(value, str) else value.startswith(envelopes.BYTES_BEGIN)):
                raise TypeError(IN_CLEAR.format(name=name, statement=statement))

    # To the store

    def closed_answer(self, response: StoredResponse, owner: ContentOwner) -> StoredResponse:
        """Seal a response."""
        if response.schema_version == SEALED_SCHEMA:
            return response
        return enclosing.sealed_answer(
            response, *self._close(enclosing.plain_answer(response), _about(owner, "answer"))
        )

    def closed_memo(self, memo: tuple[MemoEntry, ...], owner: ContentOwner) -> tuple[MemoEntry, ...]:
        """Seal the results of steps, or use the forms that they already have in the store."""
        return tuple([self._closed_entry(entry, owner) for entry in memo])

    def _closed_entry(self, entry: MemoEntry, owner: ContentOwner) -> MemoEntry:
        if was_not_sent(entry) or envelopes.key_of_text(entry.result) is not None:
            return entry
        about = _about(owner, f"step {entry.name}")
        known: tuple[bytes, str] | None = getattr(entry, "sealed", None)
        if known is not None and known[0] == about:
            text = known[1]
        else:
            tag = envelopes.tag_of(entry.result)
            text = enclosing.tagged(tag, self._close_text(envelopes.untagged(tag, entry.result), about))
            object.__setattr__(entry, "sealed", (about, text))
        return MemoEntry(entry.name, entry.kind, text, entry.by_hand)

    def closed_request(self, claim: Claim) -> bytes | None:
        """Seal the kept request of a claim."""
        return self._kept(claim.request, enclosing.about_request(claim.id, claim.fingerprint))

    def closed_accepted(self, accepted: bytes | None, owner: ContentOwner) -> bytes | None:
        """Seal the response of a 202."""
        return self._kept(accepted, _about(owner, "accepted"))

    def closed_kept(self, kept: bytes, record: Record) -> bytes | None:
        """Seal the kept request or the response of the 202, whichever the record has."""
        return self._kept(kept, _about_kept(record))

    def closed_parcel(self, parcel: Parcel) -> Parcel:
        """Seal a parcel's payload."""
        if envelopes.is_sealed(parcel.payload):
            return parcel
        return replace(parcel, payload=self._close_text(parcel.payload, _about_parcel(parcel)))

    def closed_report(self, report: CallReport) -> str:
        """Seal evidence."""
        text = report.resolution
        return text if envelopes.is_sealed(text) else self._close_text(text, _about_evidence(report))

    # From the store

    def record(
        self, record: Record, memo: tuple[MemoEntry, ...] | None = None, known: StoredResponse | None = None
    ) -> Record:
        """Open a record as far as possible; `memo` and `known`, its response, were just written by the caller."""
        response, request = record.response, record.request
        closed = response is not None and response.schema_version == SEALED_SCHEMA
        if not (closed or record.memo or request):
            return record
        values = list(_VALUES(record))
        if closed and response is not None:
            values[_RESPONSE] = known or self.response(response, record)
        if memo is None:
            values[_MEMO] = tuple([self.entry(entry, record) for entry in record.memo])
        if request is not None:
            values[_REQUEST] = self.request(record)
        return Record(*values)

    def finished(self, finished: Finished) -> Finished:
        """Open the part of a record that a repeat reads."""
        response = finished.response
        if response is None or response.schema_version != SEALED_SCHEMA:
            return finished
        return replace(finished, response=self.response(response, finished))

    def response(self, response: StoredResponse, owner: Record | Finished) -> StoredResponse:
        """Open a response, or return it as it is if it cannot be opened."""
        closed = None if response.body is None else envelopes.disclose(response.body)
        if closed is None:
            return response  # a listing, which does not read responses
        plain = self._open(closed, _about(owner, "answer"))
        return response if plain is None else enclosing.opened_answer(response, plain)

    def parcel(self, parcel: Parcel) -> Parcel:
        """Open a parcel; one that cannot be opened is not delivered, but waits."""
        text = self._open_text(parcel.payload, _about_parcel(parcel))
        return parcel if text is parcel.payload else replace(parcel, payload=text)

    def view(self, view: ParcelView, incarnation: UUID) -> ParcelView:
        """Open a parcel that is shown to an operator."""
        return replace(view, payload=self._open_text(view.payload, enclosing.about_parcel(incarnation, view.id)))

    def report(self, report: CallReport) -> CallReport:
        """Open evidence."""
        text = self._open_text(report.resolution, _about_evidence(report))
        return report if text is report.resolution else replace(report, resolution=text)

    def entry(self, entry: MemoEntry, owner: ContentOwner) -> MemoEntry:
        """Open a step's result, which keeps its stored form."""
        about = _about(owner, f"step {entry.name}")
        tag = envelopes.tag_of(entry.result)
        inside = envelopes.untagged(tag, entry.result)
        if not envelopes.is_sealed(inside):
            object.__setattr__(entry, "sealed", (about, entry.result))  # it was stored before results were sealed
            return entry
        text = self._open_text(inside, about)
        if text is inside:
            return entry
        opened = MemoEntry(entry.name, entry.kind, enclosing.tagged(tag, text), entry.by_hand)
        object.__setattr__(opened, "sealed", (about, entry.result))
        return opened

    def request(self, record: Record) -> bytes:
        """Open the content that is kept until the settlement."""
        assert record.request is not None
        closed = envelopes.disclose(record.request)
        plain = None if closed is None else self._open(closed, _about_kept(record))
        return record.request if plain is None else plain

    def _kept(self, plain: bytes | None, about: bytes) -> bytes | None:
        if plain is None or envelopes.disclose(plain) is not None:
            return plain
        return enclosing.enclose(*self._close(plain, about))

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
            return None  # the code that would use it refuses
        except Exception as error:  # noqa: BLE001  (whatever a seal of the application's own may raise)
            log.error("oncekey: opening what is %s failed: %s", envelopes.described(closed[0]), type(error).__name__)
            return None

    def _open_text(self, stored: str, about: bytes) -> str:
        closed = envelopes.disclose_text(stored)
        plain = None if closed is None else self._open(closed, about)
        return stored if plain is None else plain.decode("utf-8", "surrogatepass")


def _about(owner: ContentOwner | Finished, part: str) -> bytes:
    return enclosing.about_record(owner.id, owner.incarnation, part)


def _about_kept(record: Record) -> bytes:
    if record.effects is Effects.OUTBOX:
        return _about(record, "accepted")
    return enclosing.about_request(record.id, record.fingerprint)


def _about_parcel(parcel: Parcel) -> bytes:
    return enclosing.about_parcel(parcel.incarnation, parcel.id)


def _about_evidence(report: CallReport) -> bytes:
    return enclosing.about_evidence(report.source, report.event_id)
