"""The operators' moves: a form that says what a move will cause, a preview of what would happen now, and the move.

The engine decides and writes the move, with its line of the audit. The console only asks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import RedirectResponse, Response

from oncekey.console.access import Role
from oncekey.console.dossier import Dossier, after, gather, token_of
from oncekey.console.pages import SLUGS, Pages
from oncekey.console.views import Handler, Refused, Visit
from oncekey.core.errors import ResultNotStorableError
from oncekey.core.memo import encode, rejected
from oncekey.core.model import Completed, Effects, EntryKind, MemoEntry, Outcome, ParcelKind, Snapshot, StoredResponse
from oncekey.core.operate import Forbidden, Move, OperatorCommand, Order, decide
from oncekey.core.policy import Policy
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate
from oncekey.engine.operate import operations_of
from oncekey.ops.explain_retry import prospect

if TYPE_CHECKING:
    from oncekey.console.app import Console
    from oncekey.core.model import DeadLetter, Headers, Record

ORDERS: Final[Mapping[str, Order]] = {slug: Order(order) for order, slug in SLUGS.items()}
CAUSES: Final[Mapping[Order, str]] = {
    Order.EXECUTED: "You say that it happened. The record is completed with the answer that you give, and every retry "
    "of the client gets that answer. Nothing is executed.",
    Order.DECLINED: "You say that the provider refused it for good. The record is completed with the failure that you "
    "give, and every retry of the client gets it. Nothing is executed.",
    Order.NOT_EXECUTED: "You say that it did not happen and cannot happen any more. The next retry executes it; a "
    "deferred call goes back to the outbox. If you are wrong, it happens twice.",
    Order.RELEASE: "The record is taken from an owner that did not come back. A retry, or a worker, goes on with it; "
    "what may have happened already becomes unknown.",
    Order.BUST: "The stored answer is taken away. The next retry executes the operation.",
    Order.RETRY: "The dead letter goes back to the outbox, and a worker makes the call again, from its first attempt.",
    Order.DISCARD: "The call is given up. The record is completed as a failure, and every retry of the client gets "
    "that answer for good. By this you say that the call was not made, or was undone at the provider.",
}
RESULT: Final = (
    "You say that the call was made and what it returned. The handler goes on from there, by a retry or a worker, with "
    "the result that you give, and computes the answer itself."
)
REJECTED: Final = (
    "You say that the provider refused the call for good. The handler goes on from there with that refusal, by a retry "
    "or a worker, and computes the answer itself."
)
LETTER_CONSEQUENCES: Final[Mapping[Order, str]] = {
    Order.RETRY: "The message goes back to the outbox and is delivered again, from its first attempt. A receiver that "
    "got it already knows the repetition by its downstream key.",
    Order.DISCARD: "The dead letter is deleted: it is never delivered, and no record is changed.",
}
_FIELDS: Final = ("reason", "status", "content_type", "body", "result", "closed", "version")
_FIRST_ERROR_STATUS: Final = 400
_DEFAULTS: Final = Policy()


class FormError(Exception):
    """A field of a form has a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a move would do now."""

    cause: str
    source: str | None = None
    to: str | None = None
    retry: str | None = None


class Moves:
    """The forms, and what they do."""

    def __init__(self, console: Console, pages: Pages) -> None:
        self._console = console
        self._pages = pages
        self.reads: tuple[tuple[str, Handler, Role], ...] = (
            ("/record/{token}/move/{order}", self.form, Role.OPERATE),
            ("/letter/{id}/move/{order}", self.letter_form, Role.OPERATE),
        )
        self.writes: tuple[tuple[str, Handler, Role], ...] = (
            ("/record/{token}/move/{order}", self.move, Role.OPERATE),
            ("/letter/{id}/move/{order}", self.letter_move, Role.OPERATE),
        )

    async def form(self, visit: Visit) -> Response:
        """The form for a move of a record, with what the move will cause."""
        return self._form(visit, _order(visit), await self._pages.dossier(visit), None)

    async def move(self, visit: Visit) -> Response:
        """The preview of a move; once the operator has confirmed it, the move."""
        order, dossier = _order(visit), await self._pages.dossier(visit)
        record = dossier.record
        try:
            command = command_of(order, record, visit.form)
        except FormError as wrong:
            return self._form(visit, order, dossier, None, str(wrong))
        if visit.form_field("confirmed") != "yes":
            held = await self._console.ask(lambda store: operations_of(store).parcels(record.incarnation))
            decided = decide(command, Snapshot(record, dossier.now), held)
            if isinstance(decided, Forbidden):
                return self._form(visit, order, dossier, None, decided.why)
            return self._preview(visit, order, dossier, None, _plan(order, decided, dossier))
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        notify = self._console.notify
        if order is Order.BUST:
            await self._console.forget(record.id)
        done = await self._console.ask(lambda store: operate.act(store, record.id, command, mover, notify=notify))
        if isinstance(done, Forbidden):
            return self._form(visit, order, await self._pages.dossier(visit), None, done.why)
        return RedirectResponse(f"{visit.base}/record/{token_of(record.id)}?moved={SLUGS[order]}", 303)

    async def letter_form(self, visit: Visit) -> Response:
        """The same for a dead letter."""
        letter = await self._pages.dead_letter(visit)
        return self._form(visit, _order(visit), await self._owner(letter), letter)

    async def letter_move(self, visit: Visit) -> Response:
        """The same for a dead letter: a deferred call moves with its record, a message by itself."""
        order, letter = _order(visit), await self._pages.dead_letter(visit)
        dossier = await self._owner(letter)
        try:
            command = letter_command(order, visit.form)
        except FormError as wrong:
            return self._form(visit, order, dossier, letter, str(wrong))
        if visit.form_field("confirmed") != "yes":
            plan = Plan(LETTER_CONSEQUENCES[order])
            if dossier is not None:
                held = await self._console.ask(lambda store: operations_of(store).parcels(letter.parcel.incarnation))
                decided = decide(command, Snapshot(dossier.record, dossier.now), held)
                if isinstance(decided, Forbidden):
                    return self._form(visit, order, dossier, letter, decided.why)
                plan = _plan(order, decided, dossier)
            return self._preview(visit, order, dossier, letter, plan)
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        flow = operate.retry if order is Order.RETRY else operate.discard
        notify = self._console.notify
        done = await self._console.ask(lambda store: flow(store, letter.parcel.id, command, mover, notify=notify))
        if isinstance(done, Forbidden):
            return self._form(visit, order, dossier, letter, done.why)
        if dossier is None:
            return RedirectResponse(f"{visit.base}/letters?moved={SLUGS[order]}", 303)
        return RedirectResponse(f"{visit.base}/record/{token_of(dossier.record.id)}?moved={SLUGS[order]}", 303)

    async def _owner(self, letter: DeadLetter) -> Dossier | None:
        """The record that moves with a letter; None if the letter moves by itself."""
        if letter.parcel.kind is ParcelKind.EMIT:
            return None
        dossier = await self._console.ask(lambda store: gather(store, letter.parcel.record_id, None))
        if dossier is None or dossier.record.incarnation != letter.parcel.incarnation:
            return None
        return None if dossier.record.state in operate.SETTLED else dossier

    def _form(
        self, visit: Visit, order: Order, dossier: Dossier | None, letter: DeadLetter | None, wrong: str = ""
    ) -> Response:
        given = {name: visit.form_field(name) for name in _FIELDS}
        if dossier is not None and not given["version"]:
            given["version"] = str(dossier.record.version)
        return self._console.page(
            visit, "move.html", 422 if wrong else 200, wrong=wrong, given=given, **_about(order, dossier, letter)
        )

    def _preview(
        self, visit: Visit, order: Order, dossier: Dossier | None, letter: DeadLetter | None, plan: Plan
    ) -> Response:
        given = {name: visit.form_field(name) for name in _FIELDS}
        return self._console.page(visit, "preview.html", plan=plan, given=given, **_about(order, dossier, letter))


def command_of(order: Order, record: Record, form: Mapping[str, str]) -> OperatorCommand:
    """What a form about a record asks for."""
    declined = order is Order.DECLINED
    answer, result = None, None
    if order in {Order.EXECUTED, Order.DECLINED}:
        if record.effects is Effects.PHASED:
            result = _result(form.get("result", ""), final_no=declined)
        else:
            answer = _answer(form, final_no=declined)
    return OperatorCommand(
        order,
        _reason(form),
        answer=answer,
        result=result,
        closed=order is Order.NOT_EXECUTED and form.get("closed") == "yes",
        version=_version(form),
    )


def letter_command(order: Order, form: Mapping[str, str]) -> OperatorCommand:
    """What a form about a dead letter asks for."""
    answer = None
    if order is Order.DISCARD:
        answer = _answer(form, final_no=True) if form.get("status", "").strip() else operate.given_up()
    return OperatorCommand(order, _reason(form), answer=answer, version=_version(form))


def _order(visit: Visit) -> Order:
    order = ORDERS.get(visit.request.path_params["order"])
    for_letter = order in {Order.RETRY, Order.DISCARD}
    if order is None or for_letter != ("id" in visit.request.path_params):
        raise Refused(404, "There is no such page", "The address may be cut off.")
    return order


def _version(form: Mapping[str, str]) -> int | None:
    """The version that the operator saw; the store refuses the move if the record has changed since."""
    version = form.get("version", "")
    return int(version) if version.isascii() and version.isdigit() and len(version) < 19 else None  # noqa: PLR2004


def _reason(form: Mapping[str, str]) -> str:
    reason = form.get("reason", "").strip()
    if not any(letter.isalnum() for letter in reason):
        raise FormError("Say why: the audit keeps it, and nothing is changed without a reason.")
    return reason


def _answer(form: Mapping[str, str], *, final_no: bool) -> Completed:
    status, text = form.get("status", "").strip(), form.get("body", "")
    if not status.isascii() or not status.isdigit() or not 200 <= int(status) <= 599:  # noqa: PLR2004
        raise FormError("The client needs an answer to hear from now on: its status is a number from 200 to 599.")
    if final_no and int(status) < _FIRST_ERROR_STATUS:
        raise FormError(f"A final no is a failure, and {status} is none: say 402, 409 or the like.")
    if not final_no and int(status) >= _FIRST_ERROR_STATUS:
        raise FormError(f"It happened, and {status} says that it failed: if it was refused, say that instead.")
    # A browser sends line ends as CR LF, whatever the operator typed.
    body = text.replace("\r\n", "\n").encode()
    if len(body) > _DEFAULTS.max_response_bytes:
        raise FormError(f"The body has {len(body)} bytes, and {_DEFAULTS.max_response_bytes} are kept.")
    kind = form.get("content_type", "").strip() or "application/json"
    if not kind.isascii() or not kind.isprintable():
        raise FormError("A content type is plain text, such as application/json.")
    if body and kind == "application/json":
        try:
            json.loads(body)
        except ValueError:
            raise FormError("The body is no JSON, and its content type says that it is.") from None
    headers: Headers = ((b"content-type", kind.encode()),) if body else ()
    return Completed(StoredResponse(int(status), headers, body), Outcome.FAILURE if final_no else Outcome.SUCCESS)


def _result(text: str, *, final_no: bool) -> str:
    try:
        stored = encode(json.loads(text), _DEFAULTS.max_result_bytes)
    except (ValueError, ResultNotStorableError):
        raise FormError("The result of the call is JSON, as the call would have returned it: this is none.") from None
    return rejected(MemoEntry("-", EntryKind.CALL, stored)).result if final_no else stored


def _plan(order: Order, move: Move, dossier: Dossier) -> Plan:
    assert move.row.to is not None
    cause = cause_of(order, dossier.record)
    return Plan(cause, move.seen.state.value, move.row.to.value, prospect(after(move), dossier.now))


def cause_of(order: Order, record: Record | None) -> str:
    """What an order will cause in general, before the preview looks at the record."""
    if record is None:
        return LETTER_CONSEQUENCES[order]
    if record.effects is Effects.PHASED and order in {Order.EXECUTED, Order.DECLINED}:
        return RESULT if order is Order.EXECUTED else REJECTED
    return CAUSES[order]


def _about(order: Order, dossier: Dossier | None, letter: DeadLetter | None) -> dict[str, Any]:
    record = None if dossier is None else dossier.record
    asks = ""
    if record is not None and order in {Order.EXECUTED, Order.DECLINED}:
        asks = "result" if record.effects is Effects.PHASED else "answer"
    elif order is Order.DISCARD and record is not None:
        asks = "own answer"
    return {
        "order": order,
        "slug": SLUGS[order],
        "dossier": dossier,
        "record": record,
        "letter": letter,
        "asks": asks,
        "cause": cause_of(order, record),
        "heading": _LETTERS[order] if dossier is None else dossier.purpose(order),
    }


_LETTERS: Final[Mapping[Order, str]] = {
    Order.RETRY: "The message shall be delivered again",
    Order.DISCARD: "The message is given up",
}
