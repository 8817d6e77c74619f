"""The dead letters: the list with its filters, one letter, and one order for many of them.

An order for many is carried out letter by letter, each with its own transaction and audit line, and only on letters as
the preview showed them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode
from uuid import UUID

from oncekey.console.access import Role
from oncekey.console.orders import FOR_LETTERS, MESSAGE, ORDERS, SLUGS, Words, refusal_of, runbook_of, words_of
from oncekey.console.views import FormError, Handler, Refused, Visit, is_number, reason_of, scope_of_tenant, span_of
from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import DeadLetter, Instant, ParcelKind
from oncekey.core.operate import Forbidden, Move, OperatorCommand, Order
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import operate
from oncekey.engine.operate import box_of, disclose_letter, foresee, survey_of
from oncekey.ops.stats import FIRST_LETTER, LetterWalk

if TYPE_CHECKING:
    from starlette.responses import Response

    from oncekey.console.app import Console
    from oncekey.core.flow import Flow
    from oncekey.core.model import Record
    from oncekey.ops.stats import LetterPosition
    from oncekey.ports.store import Store

PAGE: Final = 50
MANY: Final = 100
"""The most letters that one bulk order changes."""
FILTERS: Final = ("tenant", "topic", "kind", "error", "older", "younger")
LOST: Final = "the connection was lost during the commit, so the change may have been made: check the audit"
NOT_DONE: Final = "not done: the store does not respond"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an order would do to a letter now, or why it is refused."""

    letter: DeadLetter
    order: Order
    words: Words
    version: int | None = None
    """The version of the record that moves with the letter."""
    refused: str = ""
    runbook: str = ""

    @property
    def slug(self) -> str:
        """The order in a URL."""
        return SLUGS[self.order]

    @property
    def token(self) -> str:
        """The letter as it was shown: its id, its death, and the version of its record."""
        return f"{self.letter.parcel.id}.{self.letter.died_at}.{'' if self.version is None else self.version}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A letter of a preview."""

    id: UUID
    died_at: Instant
    version: int | None


class LetterPages:
    """The pages about dead letters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.reads: tuple[tuple[str, Handler, Role], ...] = (
            ("/letters", self.letters, Role.READ),
            ("/letter/{id}", self.letter, Role.READ),
            ("/letters/move/{order}", self.preview, Role.OPERATE),
        )
        self.writes: tuple[tuple[str, Handler, Role], ...] = (
            ("/letter/{id}", self.contents, Role.READ),
            ("/letters/move/{order}", self.move, Role.OPERATE),
        )

    async def letters(self, visit: Visit) -> Response:
        """The dead letters that match the filters, oldest first."""
        after, (wanted, wrong) = _place(visit.asked("after")), self._wanted(visit)
        part = await self._console.ask(lambda store: survey_of(store).letters(wanted, PAGE, after))
        asked = {name: visit.asked(name) for name in FILTERS}
        given = {name: word for name, word in asked.items() if word}
        further = ""
        if part.further is not None:
            further = urlencode({**given, "after": f"{part.further[0]}.{part.further[1]}"})
        return self._console.page(
            visit,
            "letters.html",
            part=part,
            asked=asked,
            filters=urlencode(given),
            narrowed=bool(given),
            wrong=wrong,
            further=further,
            first=after == FIRST_LETTER,
            kinds=tuple(ParcelKind),
            runbook=runbook_of(Order.RETRY, None),
        )

    async def letter(self, visit: Visit) -> Response:
        """One dead letter, with its payload hidden; `contents` shows it."""
        return await self._shown(visit, await self.dead_letter(visit), contents=False)

    async def contents(self, visit: Visit) -> Response:
        """One dead letter with its payload; the audit records who viewed it."""
        letter = await self.dead_letter(visit)
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        why = visit.form_field("why").strip() or "viewed in the console"
        await self._console.ask(lambda store: disclose_letter(store, letter, mover, why))
        return await self._shown(visit, letter, contents=True)

    async def dead_letter(self, visit: Visit) -> DeadLetter:
        """The letter that a URL names."""
        try:
            letter_id = UUID(visit.request.path_params["id"])
        except ValueError:
            raise Refused(404, "There is no such page", "The address may be incomplete.") from None
        letter = await self._console.ask(lambda store: box_of(store).find_dead_letter(letter_id))
        if letter is None:
            raise Refused(
                404, "There is no such dead letter", "An operator may have retried or discarded it: see the audit."
            )
        return letter

    async def outlook(self, letter: DeadLetter, order: Order) -> Outlook:
        """What an order would do to a letter now."""
        return await self._console.ask(lambda store: _outlook(store, letter, order))

    async def _shown(self, visit: Visit, letter: DeadLetter, *, contents: bool) -> Response:
        outlooks = [await self.outlook(letter, order) for order in FOR_LETTERS]
        return self._console.page(
            visit,
            "letter.html",
            letter=letter,
            contents=contents,
            outlooks=outlooks,
            runbook=runbook_of(Order.RETRY, None),
        )

    # One order for many

    async def preview(self, visit: Visit) -> Response:
        """What an order would do now to the letters that match the filters."""
        order, (wanted, wrong) = _order(visit), self._wanted(visit)
        part = await self._console.ask(lambda store: survey_of(store).letters(wanted, MANY))
        found = () if wrong else part.letters
        outlooks = [await self.outlook(letter, order) for letter in found]
        return self._previewed(visit, order, outlooks, wrong, more=part.further is not None)

    async def move(self, visit: Visit) -> Response:
        """Carry out an order on the letters of a preview, one by one; those that changed since are left out."""
        order, chosen = _order(visit), _chosen(visit.form_field("chosen"))
        try:
            reason = reason_of(visit.form)
        except FormError as wrong:
            found = [await self._console.ask(partial(_find, one=one)) for one in chosen]
            outlooks = [await self.outlook(letter, order) for letter in found if letter is not None]
            return self._previewed(visit, order, outlooks, str(wrong))
        mover, notify = Mover(Actor.OPERATOR, visit.session.operator.name), self._console.notify
        flow = operate.retry if order is Order.RETRY else operate.discard
        left_out: list[tuple[UUID, str]] = []
        for place, one in enumerate(chosen):
            command = _command(order, reason, one.version, one.died_at)
            moving = partial(flow, letter_id=one.id, command=command, mover=mover, notify=notify)
            try:
                done = await self._console.ask(moving)
            except StoreError as error:
                lost = LOST if isinstance(error, CommitAmbiguousError) else NOT_DONE
                left_out += [(one.id, lost), *((later.id, NOT_DONE) for later in chosen[place + 1 :])]
                break
            if isinstance(done, Forbidden):
                left_out.append((one.id, refusal_of(order, done)))
        return self._console.page(
            visit,
            "letters_moved.html",
            done=len(chosen) - len(left_out),
            left_out=left_out,
            verb="retried" if order is Order.RETRY else "discarded",
            reason=reason,
        )

    def _previewed(
        self, visit: Visit, order: Order, outlooks: list[Outlook], wrong: str, *, more: bool = False
    ) -> Response:
        moved = [one for one in outlooks if not one.refused]
        groups = Counter((one.letter.parcel.topic, one.letter.parcel.kind, one.letter.last_error) for one in moved)
        return self._console.page(
            visit,
            "letters_move.html",
            422 if wrong else 200,
            verb="Retry" if order is Order.RETRY else "Discard",
            slug=SLUGS[order],
            moved=moved,
            groups=groups.most_common(),
            effects=tuple(dict.fromkeys((one.letter.parcel.kind, one.words.effect) for one in moved)),
            refused=[one for one in outlooks if one.refused],
            chosen=" ".join(one.token for one in moved),
            filters={name: visit.asked(name) for name in FILTERS if visit.asked(name)},
            reason=visit.form_field("reason"),
            wrong=wrong,
            more=more,
            many=MANY,
        )

    def _wanted(self, visit: Visit) -> tuple[LetterWalk, str]:
        older, younger, kind = span_of(visit.asked("older")), span_of(visit.asked("younger")), visit.asked("kind")
        wrong = "" if older is not None and younger is not None else "Enter an age as 90s, 15m, 2h or 3d."
        return LetterWalk(
            scope=scope_of_tenant(visit.asked("tenant"), self._console.namespace),
            topic=visit.asked("topic") or None,
            kind=ParcelKind(kind) if kind in set(ParcelKind) else None,
            error=visit.asked("error") or None,
            older=older or 0,
            younger=younger or 0,
        ), wrong


def _outlook(store: Store, letter: DeadLetter, order: Order) -> Flow[Outlook]:
    seen = yield from foresee(store, letter, _command(order, "-"))
    if isinstance(seen, Move):
        return Outlook(letter, order, words_of(order, seen.seen), seen.seen.version)
    if seen is None:
        return Outlook(letter, order, MESSAGE[order])
    record: Record | None = (yield from store.find(letter.parcel.record_id)).record
    words = MESSAGE[order] if record is None else words_of(order, record)
    return Outlook(letter, order, words, None, refusal_of(order, seen), runbook_of(order, None))


def _find(store: Store, one: Chosen) -> Flow[DeadLetter | None]:
    """The letter of a preview; None if it has changed since."""
    letter = yield from box_of(store).find_dead_letter(one.id)
    return letter if letter is not None and letter.died_at == one.died_at else None


def _command(order: Order, reason: str, version: int | None = None, died_at: Instant | None = None) -> OperatorCommand:
    answer = operate.given_up() if order is Order.DISCARD else None
    return OperatorCommand(order, reason, answer=answer, version=version, died_at=died_at)


def _order(visit: Visit) -> Order:
    order = ORDERS.get(visit.request.path_params["order"])
    if order is None or order not in FOR_LETTERS:
        raise Refused(404, "There is no such page", "The address may be incomplete.")
    return order


def _chosen(text: str) -> tuple[Chosen, ...]:
    """The letters that a form carries, as its preview showed them."""
    tokens = text.split()
    if not tokens or len(tokens) > MANY:
        raise Refused(400, "No dead letters are chosen", "Nothing was changed. Open the list and choose them again.")
    return tuple(_one(token) for token in dict.fromkeys(tokens))


def _one(token: str) -> Chosen:
    name, at, version = (*token.split("."), "", "", "")[:3]
    try:
        letter_id = UUID(name)
    except ValueError:
        letter_id = None
    if letter_id is None or not is_number(at) or (version and not is_number(version)):
        raise Refused(400, "The form is damaged", "Nothing was changed. Open the list and choose them again.")
    return Chosen(letter_id, int(at), int(version) if version else None)


def _place(token: str) -> LetterPosition:
    """The place where the next page of the list begins; the first page if the token is not a place."""
    at, _, name = token.partition(".")
    try:
        return (int(at), UUID(name)) if is_number(at) else FIRST_LETTER
    except ValueError:
        return FIRST_LETTER
