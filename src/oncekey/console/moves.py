"""The operators' moves: a form that describes the effect, a preview of what would happen now, and the move.

The engine decides and writes the move, with its audit line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import RedirectResponse, Response

from oncekey.console.access import Role
from oncekey.console.dossier import Dossier, after, gather, token_of
from oncekey.console.orders import FOR_LETTERS, MESSAGE, ORDERS, SLUGS, refusal_of, runbook_of
from oncekey.console.views import FormError, Handler, Refused, Visit, is_number, reason_of
from oncekey.core.errors import ResultNotStorableError
from oncekey.core.memo import decode, encode, rejected
from oncekey.core.model import Completed, Effects, EntryKind, MemoEntry, Outcome, ParcelKind, Snapshot, StoredResponse
from oncekey.core.operate import Forbidden, Move, OperatorCommand, Order, decide
from oncekey.core.policy import Policy
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate
from oncekey.engine.operate import operations_of
from oncekey.ops.explain_retry import prospect
from oncekey.workers.tasks import result_mismatch

if TYPE_CHECKING:
    from oncekey.console.app import Console
    from oncekey.console.letters import LetterPages
    from oncekey.console.pages import Pages
    from oncekey.core.model import DeadLetter, Headers, Record

_FIELDS: Final = ("reason", "status", "content_type", "body", "result", "closed", "version", "died_at")
_FIRST_ERROR_STATUS: Final = 400
_DEFAULTS: Final = Policy()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a move would do now."""

    cause: str
    source: str | None = None
    to: str | None = None
    retry: str | None = None


class Moves:
    """The forms, and the moves that they make."""

    def __init__(self, console: Console, pages: Pages, letters: LetterPages) -> None:
        self._console = console
        self._pages = pages
        self._letters = letters
        self.reads: tuple[tuple[str, Handler, Role], ...] = (
            ("/record/{token}/move/{order}", self.form, Role.OPERATE),
            ("/letter/{id}/move/{order}", self.letter_form, Role.OPERATE),
        )
        self.writes: tuple[tuple[str, Handler, Role], ...] = (
            ("/record/{token}/move/{order}", self.move, Role.OPERATE),
            ("/letter/{id}/move/{order}", self.letter_move, Role.OPERATE),
        )

    async def form(self, visit: Visit) -> Response:
        """The form for a move of a record, with its effect; or why the move would be refused."""
        order, dossier = _order(visit), await self._pages.dossier(visit)
        return self._form(visit, order, dossier, None, refused=dossier.objection(order))

    async def move(self, visit: Visit) -> Response:
        """The preview of a move; once the operator has confirmed it, the move."""
        order, dossier = _order(visit), await self._pages.dossier(visit)
        record = dossier.record
        try:
            command = command_of(order, record, visit.form)
            self._check_result(command, record)
        except FormError as wrong:
            return self._form(visit, order, dossier, None, str(wrong))
        if visit.form_field("confirmed") != "yes":
            held = await self._console.ask(lambda store: operations_of(store).parcels(record.incarnation))
            decided = decide(command, Snapshot(record, dossier.now), held)
            if isinstance(decided, Forbidden):
                return self._form(visit, order, dossier, None, refusal_of(order, decided))
            return self._preview(visit, order, dossier, None, _plan(order, decided, dossier))
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        notify = self._console.notify
        if order is Order.BUST:
            await self._console.forget(record.id)
        done = await self._console.ask(lambda store: operate.act(store, record.id, command, mover, notify=notify))
        if isinstance(done, Forbidden):
            return self._form(visit, order, await self._pages.dossier(visit), None, refusal_of(order, done))
        return RedirectResponse(f"{visit.base}/record/{token_of(record.id)}?moved={SLUGS[order]}", 303)

    async def letter_form(self, visit: Visit) -> Response:
        """The form for a move of a dead letter; or why the move would be refused."""
        order, letter = _order(visit), await self._letters.dead_letter(visit)
        outlook = await self._letters.outlook(letter, order)
        return self._form(visit, order, await self._owner(letter), letter, refused=outlook.refused)

    async def letter_move(self, visit: Visit) -> Response:
        """Preview or make a move of a dead letter: a deferred call moves with its record, a message alone."""
        order, letter = _order(visit), await self._letters.dead_letter(visit)
        dossier = await self._owner(letter)
        try:
            command = letter_command(order, visit.form)
        except FormError as wrong:
            return self._form(visit, order, dossier, letter, str(wrong))
        if visit.form_field("confirmed") != "yes":
            seen = await self._console.ask(lambda store: operate.foresee(store, letter, command))
            if isinstance(seen, Forbidden):
                return self._form(visit, order, dossier, letter, refusal_of(order, seen))
            plan = Plan(MESSAGE[order].effect)
            if seen is not None and dossier is not None:
                plan = _plan(order, seen, dossier)
            return self._preview(visit, order, dossier, letter, plan)
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        flow = operate.retry if order is Order.RETRY else operate.discard
        notify = self._console.notify
        done = await self._console.ask(lambda store: flow(store, letter.parcel.id, command, mover, notify=notify))
        if isinstance(done, Forbidden):
            return self._form(visit, order, dossier, letter, refusal_of(order, done))
        if dossier is None:
            return RedirectResponse(f"{visit.base}/letters?moved={SLUGS[order]}", 303)
        return RedirectResponse(f"{visit.base}/record/{token_of(dossier.record.id)}?moved={SLUGS[order]}", 303)

    def _check_result(self, command: OperatorCommand, record: Record) -> None:
        """Refuse a result that does not match the handler's `result=`, which only a console with a `Once` knows."""
        once = self._console.store
        if isinstance(once, str) or command.result is None or command.order is not Order.EXECUTED:
            return
        wrong = result_mismatch(once, record, decode(command.result))
        if wrong is not None:
            raise FormError(f"The result is {wrong}.")

    async def _owner(self, letter: DeadLetter) -> Dossier | None:
        """The record that moves with a letter; None if the letter moves alone."""
        if letter.parcel.kind is ParcelKind.EMIT:
            return None
        dossier = await self._console.ask(lambda store: gather(store, letter.parcel.record_id, None))
        if dossier is None or dossier.record.incarnation != letter.parcel.incarnation:
            return None
        return None if dossier.record.state in operate.SETTLED else dossier

    def _form(
        self,
        visit: Visit,
        order: Order,
        dossier: Dossier | None,
        letter: DeadLetter | None,
        wrong: str = "",
        *,
        refused: str = "",
    ) -> Response:
        given = {name: visit.form_field(name) for name in _FIELDS}
        if letter is not None and not given["died_at"]:
            given["died_at"] = str(letter.died_at)
        if dossier is not None and not given["version"]:
            given["version"] = str(dossier.record.version)
        return self._console.page(
            visit,
            "move.html",
            422 if wrong else 200,
            wrong=wrong,
            refused=refused,
            given=given,
            checks_results=not isinstance(self._console.store, str),
            **_about(order, dossier, letter),
        )

    def _preview(
        self, visit: Visit, order: Order, dossier: Dossier | None, letter: DeadLetter | None, plan: Plan
    ) -> Response:
        given = {name: visit.form_field(name) for name in _FIELDS}
        return self._console.page(visit, "preview.html", plan=plan, given=given, **_about(order, dossier, letter))


def command_of(order: Order, record: Record, form: Mapping[str, str]) -> OperatorCommand:
    """The command that the form of a record describes."""
    declined = order is Order.DECLINED
    answer, result = None, None
    if order in {Order.EXECUTED, Order.DECLINED}:
        if record.effects is Effects.PHASED:
            result = _result(form.get("result", ""), final_no=declined)
        else:
            answer = _answer(form, final_no=declined)
    return OperatorCommand(
        order,
        reason_of(form),
        answer=answer,
        result=result,
        closed=order is Order.NOT_EXECUTED and form.get("closed") == "yes",
        version=_number(form, "version"),
    )


def letter_command(order: Order, form: Mapping[str, str]) -> OperatorCommand:
    """The command that the form of a dead letter describes."""
    answer = None
    if order is Order.DISCARD:
        answer = _answer(form, final_no=True) if form.get("status", "").strip() else operate.given_up()
    version, died_at = _number(form, "version"), _number(form, "died_at")
    return OperatorCommand(order, reason_of(form), answer=answer, version=version, died_at=died_at)


def _order(visit: Visit) -> Order:
    order = ORDERS.get(visit.request.path_params["order"])
    if order is None or (order in FOR_LETTERS) != ("id" in visit.request.path_params):
        raise Refused(404, "There is no such page", "The address may be incomplete.")
    return order


def _number(form: Mapping[str, str], name: str) -> int | None:
    """What the operator saw, from a hidden field: the move is refused if it has changed since."""
    value = form.get(name, "")
    return int(value) if is_number(value) else None


def _answer(form: Mapping[str, str], *, final_no: bool) -> Completed:
    status, text = form.get("status", "").strip(), form.get("body", "")
    if not status.isascii() or not status.isdigit() or not 200 <= int(status) <= 599:  # noqa: PLR2004
        raise FormError("Enter the status of the response that clients will receive, from 200 to 599.")
    if final_no and int(status) < _FIRST_ERROR_STATUS:
        raise FormError(f"{status} is not a failure. Enter a status such as 402 or 409.")
    if not final_no and int(status) >= _FIRST_ERROR_STATUS:
        raise FormError(f"{status} is a failure. If the provider declined the call, record that instead.")
    # A browser sends line ends as CR LF, whatever the operator typed.
    body = text.replace("\r\n", "\n").encode()
    if len(body) > _DEFAULTS.max_response_bytes:
        raise FormError(f"The body has {len(body)} bytes; the limit is {_DEFAULTS.max_response_bytes}.")
    kind = form.get("content_type", "").strip() or "application/json"
    if not kind.isascii() or not kind.isprintable():
        raise FormError("Enter a content type such as application/json.")
    if body and kind == "application/json":
        try:
            json.loads(body)
        except ValueError:
            raise FormError("The body is not valid JSON. Correct it, or change the content type.") from None
    headers: Headers = ((b"content-type", kind.encode()),) if body else ()
    return Completed(StoredResponse(int(status), headers, body), Outcome.FAILURE if final_no else Outcome.SUCCESS)


def _result(text: str, *, final_no: bool) -> str:
    try:
        stored = encode(json.loads(text), _DEFAULTS.max_result_bytes)
    except (ValueError, ResultNotStorableError):
        wrong = "The result is not valid JSON. Enter it as the call would have returned it."
        if final_no:
            wrong = "The refusal is not valid JSON. Enter it as the handler receives it, in RejectedError."
        raise FormError(wrong) from None
    return rejected(MemoEntry("-", EntryKind.CALL, stored)).result if final_no else stored


def _plan(order: Order, move: Move, dossier: Dossier) -> Plan:
    assert move.row.to is not None
    cause = dossier.words(order).effect
    return Plan(cause, move.seen.state.value, move.row.to.value, prospect(after(move), dossier.now))


def _about(order: Order, dossier: Dossier | None, letter: DeadLetter | None) -> dict[str, Any]:
    record = None if dossier is None else dossier.record
    asks = ""
    if record is not None and order in {Order.EXECUTED, Order.DECLINED}:
        asks = "answer"
        if record.effects is Effects.PHASED:
            asks = "result" if order is Order.EXECUTED else "refusal"
    elif order is Order.DISCARD and record is not None:
        asks = "own answer"
    words = MESSAGE[order] if dossier is None else dossier.words(order)
    return {
        "slug": SLUGS[order],
        "dossier": dossier,
        "record": record,
        "letter": letter,
        "asks": asks,
        "cause": words.effect,
        "heading": words.label,
        "runbook": runbook_of(order, record),
    }
