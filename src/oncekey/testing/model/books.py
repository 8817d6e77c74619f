"""The books: what really happened, which no rule may consult, and what must be true of it at every step."""

from __future__ import annotations

from oncekey.core.model import Effects, State
from oncekey.core.transitions import Row, Trigger
from oncekey.testing.model.law import Trial
from oncekey.testing.model.world import REST, Answer, Book, Books, Breach, Rec, World


def book_of(books: Books, incarnation: int) -> Book:
    """The book of one incarnation; one that nobody can add to any more is blank."""
    return books[incarnation - 1] or Book()


def with_book(books: Books, incarnation: int, book: Book) -> Books:
    """The books with one of them changed."""
    return (*books[: incarnation - 1], book, *books[incarnation:])


def count_effect(trial: Trial, books: Books, incarnation: int) -> Books:
    """The effect happened once more."""
    book = book_of(books, incarnation)
    if book.effects and not trial.scenario.forgives:
        raise Breach("double effect: one request was executed twice")
    if book.answer is not None and not book.answer.ok:
        raise Breach("a request that was answered as failed was executed afterwards")
    return with_book(books, incarnation, book._replace(effects=min(book.effects + 1, 2)))


def count_rows(books: Books, rec: Rec) -> Books:
    """The handler's own rows were committed once more."""
    book = book_of(books, rec.incarnation)
    if book.rows:
        raise Breach(f"double effect: the rows of a handler with {rec.effects} effects were written twice")
    return with_book(books, rec.incarnation, book._replace(rows=1))


def keep_promise(world: World, row: Row, rec: Rec | None) -> None:
    """An answer that may have been given stays, until its time is over or an operator takes it back."""
    old = world.rec
    if old is None or old.state is not State.COMPLETED or row.trigger is Trigger.BUST:
        return
    book = book_of(world.books, old.incarnation)
    if book.promised and (rec is None or rec.answer != book.answer):
        raise Breach(f"an acknowledged answer was lost: {row.trigger} over a completed record")


def take_back(books: Books, old: Rec) -> Books:
    """An operator took the answer back; whether a success may run again is the guard's business."""
    book = book_of(books, old.incarnation)
    return with_book(books, old.incarnation, book._replace(answer=None, promised=False))


def completed(trial: Trial, world: World, books: Books, rec: Rec) -> Books:
    """A new answer, held against what really happened."""
    answer, book = rec.answer, book_of(books, rec.incarnation)
    if answer is None:
        raise Breach("completed without an answer")
    happened = book.effects > 0 or any(charge.body == rec.body for charge in world.ledger)
    if answer.ok:
        _hold_success(rec, answer, happened=happened)
    elif book.effects > 0 and not trial.scenario.forgives:
        raise Breach("wrong answer: told a failure, and it happened")
    return with_book(books, rec.incarnation, book._replace(answer=answer, promised=True))


def _hold_success(rec: Rec, answer: Answer, *, happened: bool) -> None:
    if answer.value != rec.body:
        raise Breach(f"wrong answer: {rec.body} was told about the effect of {answer.value or 'nobody'}")
    if not happened:
        raise Breach("wrong answer: told a success, and nothing happened")
    if rec.effects is Effects.PHASED and rec.result(REST) is None:
        raise Breach("the rest of the handler was skipped: the call is made, and what follows it is not")
